"""The one set of live emitters, and the flag that says whether there is any.

`recording` is what an idle annotation reads, after `tracing` (15 ns); it is True while some emitter listens.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .. import compat, log
from ..config import settings
from ..guard import guard
from ..interrupts import is_interrupt
from .emitters import Emitter, attached, redundant
from .emitters.jax import JaxEmitter
from .emitters.torch_nested import NestedTorchProfilerEmitter, torch_emitter
from .region import Region

Token = tuple[Callable[[Any], None], Any]  # what closes a region, with its argument


class NullEmitter:
    """Takes regions when nobody listens."""

    name = "none"

    def push(self, region: Region) -> None:
        """Do nothing."""

    def pop(self, handle: Any) -> None:
        """Do nothing."""

    start = push
    end = pop
    mark = push


class FanOutEmitter:
    """Shows each region in several profilers; one that fails leaves the others alone."""

    name = "several"

    def __init__(self, emitters: Sequence[Emitter]) -> None:
        self._emitters = emitters

    def push(self, region: Region) -> list[Token]:
        """Open a nested range in each."""
        return [attempt(emitter, emitter.push, emitter.pop, region) for emitter in self._emitters]

    def start(self, region: Region) -> list[Token]:
        """Open a range in each that others may overlap."""
        return [attempt(emitter, emitter.start, emitter.end, region) for emitter in self._emitters]

    def pop(self, tokens: list[Token]) -> None:
        """Close what `push` or `start` opened, last first."""
        for token in reversed(tokens):
            leave(token)

    end = pop

    def mark(self, region: Region) -> None:
        """Show an instant in each."""
        for emitter in self._emitters:
            attempt(emitter, emitter.mark, NULL_EMITTER.pop, region)


class _Here(threading.local):
    """How many regions called `ONCE` are open on this thread."""

    open = 0


NULL_EMITTER = NullEmitter()
NOTHING: Token = (NULL_EMITTER.pop, None)  # closes nothing
ONCE = "backward"  # a region that this library draws itself, unless the program drew one of that name around it
_here = _Here()
recording = False
current: Emitter = NULL_EMITTER  # whom regions go to
compiled_away: set[str] = set()  # names of regions inside compiled code
_told: set[str] = set()  # those that were logged
SHOWN = 10  # names in one line of the log


def tracing() -> bool:
    """Tell whether Dynamo traces the caller; replaced by torch's own function once torch is imported."""
    return False


def hide(name: str) -> None:
    """Note that the region ``name`` is inside compiled code, where no profiler will see it.

    Dynamo calls this while it traces and leaves no trace of it in the graph: that is what the attribute
    below (`torch.compiler.assume_constant_result`) asks for.
    """
    compiled_away.add(name)


hide._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tell_hidden() -> None:
    """Log which regions are inside compiled code, each once."""
    names = sorted(compiled_away - _told)
    if names:
        _told.update(names)
        shown = [*names[:SHOWN], *([f"{len(names) - SHOWN} more"] if len(names) > SHOWN else [])]
        log.info("regions inside compiled code are not recorded; annotate around the compiled call", regions=shown)


def attempt(
    emitter: Emitter, begin: Callable[[Region], Any], close: Callable[[Any], None], region: Region
) -> Token:
    """Begin ``region`` in ``emitter``; if that fails, take the emitter out."""
    try:
        return close, begin(region)
    except Exception as error:
        return failed(emitter, error)


def failed(emitter: Emitter, error: Exception) -> Token:
    """Take ``emitter`` out; the region it failed to open has nothing to close."""
    if is_interrupt(error):
        raise error
    try:
        active.drop(emitter, error)
    except Exception as another:
        if another is error:
            raise
        guard.failed(f"emitter {emitter.name}", another)
    return NOTHING


def enter(region: Region) -> Token:
    """Open ``region`` wherever somebody listens; close it with `leave` on the same thread, innermost first."""
    emitter = current
    try:
        token = emitter.pop, emitter.push(region)
    except Exception as error:
        try:
            token = failed(emitter, error)
        except Exception as raised:
            if raised is error:
                raise
            return NOTHING
    if region.name == ONCE:
        _here.open += 1
        return _leave_once, token
    return token


def _leave_once(token: Token) -> None:
    _here.open -= 1
    token[0](token[1])


def is_open() -> bool:
    """Tell whether a region called `ONCE` is open on this thread."""
    return _here.open > 0


def enter_beside_torch(region: Region) -> Token:
    """Open ``region`` like `enter`, but where a range of that name, which torch opens itself, shows already."""
    emitters = current._emitters if isinstance(current, FanOutEmitter) else [current]
    others = [emitter for emitter in emitters if emitter.name != "torch"]
    if compat.profiler_running():
        drawn = [(emitter, {"torch", emitter.name}) for emitter in others]
        others = [emitter for emitter, pair in drawn if not pair & redundant(list(pair), active._target)]
    shown = FanOutEmitter(others)
    return shown.pop, shown.push(region)


def start(region: Region) -> Token:
    """Open ``region`` like `enter`, in a way that other regions may overlap: for code that is suspended."""
    emitter = current
    try:
        return emitter.end, emitter.start(region)
    except Exception as error:
        try:
            return failed(emitter, error)
        except Exception as raised:
            if raised is error:
                raise
            return NOTHING


def leave(token: Token) -> None:
    """Close what `enter` or `start` opened, whoever listens by now."""
    try:
        token[0](token[1])
    except Exception as error:
        try:
            guard.failed("closing a region", error)
        except Exception as raised:
            if raised is error:
                raise


def instant(region: Region) -> None:
    """Show an instant wherever somebody listens."""
    emitter = current
    attempt(emitter, emitter.mark, NULL_EMITTER.pop, region)


class ActiveEmitters:
    """Which emitters listen, and why."""

    def __init__(self) -> None:
        self._attached: list[Emitter] = []  # their tool was there when the process started
        self._recording: list[Emitter] = []  # while a torch profiler records: torch's own, and JAX's
        self._added: list[Emitter] = []  # by other parts of the library, from `add` to `remove`
        self._failed: set[str] = set()  # the names of emitters that were taken out
        self._target = ""
        self._hears_torch = False
        self.expected = 0  # recordings in warm-up, which begin at a later step
        self.observers: list[Callable[[], None]] = []  # called when a recording warms up, starts or stops

    def _settle(self) -> None:
        """Take a change in, each region going to every profiler once."""
        global recording, current
        before = recording
        emitters = [*self._attached, *self._recording, *self._added]
        drop = redundant([emitter.name for emitter in emitters], self._target)
        emitters = [emitter for emitter in emitters if emitter.name not in drop]
        current = FanOutEmitter(emitters) if len(emitters) > 1 else emitters[0] if emitters else NULL_EMITTER
        recording = bool(emitters)
        if recording or before:
            self._notify()

    def _notify(self) -> None:
        for observer in self.observers:
            with guard.contained("following the profilers"):
                observer()

    def expect(self, more: int) -> None:
        """Count one recording more (1) or less (-1) that is in warm-up; hooks are put on modules for it."""
        self.expected += more
        if more > 0 or not recording:
            self._notify()

    def drop(self, emitter: Emitter, error: Exception) -> None:
        """Take a failing emitter out for good; torch's gets another chance with the next recording."""
        if isinstance(error, (MemoryError, RecursionError)):  # the program's: this one region is not shown
            guard.note(f"emitter {emitter.name}", error)
        else:
            self._attached = [other for other in self._attached if other is not emitter]
            self._recording = [other for other in self._recording if other is not emitter]
            self._added = [other for other in self._added if other is not emitter]
            self._failed.add(emitter.name)
            self._settle()
            guard.failed(f"emitter {emitter.name}", error)

    def add(self, emitter: Emitter) -> None:
        """Let ``emitter`` hear of regions until `remove`."""
        self._added.append(emitter)
        self._settle()

    def remove(self, emitter: Emitter) -> None:
        """Take ``emitter`` out again; a second time does nothing."""
        self._added = [other for other in self._added if other is not emitter]
        self._settle()

    def detect(self) -> None:
        """Look for the tools that this process runs under, again when a window opens."""
        self._attached = attached(self._attached, self._failed)
        self._settle()

    @guard.contained("looking for profilers")
    def configured(self) -> None:
        """Attach what was chosen by hand, also what failed before."""
        self._failed.clear()
        self.detect()

    @guard.contained("following torch's profiler")
    def hear_torch(self, torch: Any) -> None:
        """Follow torch's profilers and compiler from now on."""
        global tracing
        if not self._hears_torch:
            self._hears_torch = True
            tracing = torch.compiler.is_dynamo_compiling
            compat.on_profiler(self._profiler_started, self._profiler_stopped)

    @guard.contained("following torch's profiler")
    def _profiler_started(self, target: str, profiler: Any) -> None:
        """A torch profiler is about to record."""
        self._target, self._recording = target, []
        with guard.contained("following torch's profiler"):
            NestedTorchProfilerEmitter.end_all()  # of a recording that this one takes the place of
            auto = settings.emitters == "auto"
            if auto or "torch" in settings.emitters:
                self._recording.append(torch_emitter(profiler))
            if auto and sys.modules.get("jax") is not None and "jax" not in self._failed:
                self._recording.append(JaxEmitter())
        self._settle()

    @guard.contained("following torch's profiler")
    def _profiler_stopped(self) -> None:
        """The torch profiler stopped recording."""
        self._recording = []
        with guard.contained("following torch's profiler"):
            self._settle()
        NestedTorchProfilerEmitter.end_all()

    def check(self) -> None:
        """Find out that torch's profiler stopped, where an interrupt kept it from saying so."""
        if not compat.profiler_running():
            self._profiler_stopped()


active = ActiveEmitters()


@guard.contained("looking for profilers")
def _listen() -> None:
    """Follow torch, now or once it is imported, and the tools that this process runs under."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "compiler"):
        active.hear_torch(torch)
    else:
        compat.when_imported("torch", active.hear_torch)
    settings.listeners.append(active.configured)
    active.detect()


if settings.enabled:
    _listen()
