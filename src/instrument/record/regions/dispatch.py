"""The active emitters, to which every region is dispatched, and the flag that says whether there are any.

An idle annotation reads `recording` after `tracing` (15 ns); it is True while an emitter is active.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...base import log
from ...base.compat import profilers
from ...base.config import settings
from ...base.guard import guard
from ...base.imports import ImportHook
from ...base.interrupts import is_interrupt
from ...base.patch import Patch, apply
from .emitters import Emitter, JaxEmitter, attached, redundant
from .region import Region
from .torch_emitters import NestedTorchProfilerEmitter, RecordingNotes, TorchProfilerEmitter, torch_emitter
from .triton_regions import LaunchRegions, ProtonSessions

Token = tuple[Callable[[Any], None], Any]  # the function that closes a region, and its argument


class NullEmitter:
    """Ignores regions while no emitter is active."""

    name = "none"

    def push(self, region: Region) -> None:
        """Do nothing."""

    def pop(self, handle: Any) -> None:
        """Do nothing."""

    start = push
    end = pop
    mark = push


class FanOutEmitter:
    """Shows each region in several profilers; if one fails, the others continue."""

    name = "several"

    def __init__(self, emitters: Sequence[Emitter]) -> None:
        self._emitters = emitters

    def push(self, region: Region) -> list[Token]:
        """Open a nested range in each profiler."""
        return [try_emit(emitter, emitter.push, emitter.pop, region) for emitter in self._emitters]

    def start(self, region: Region) -> list[Token]:
        """Open a range in each profiler; other ranges may overlap it."""
        return [try_emit(emitter, emitter.start, emitter.end, region) for emitter in self._emitters]

    def pop(self, tokens: list[Token]) -> None:
        """Close the ranges that `push` or `start` opened, last first."""
        for token in reversed(tokens):
            leave(token)

    end = pop

    def mark(self, region: Region) -> None:
        """Show an instant in each profiler."""
        for emitter in self._emitters:
            try_emit(emitter, emitter.mark, NULL_EMITTER.pop, region)


def joined(emitters: Sequence[Emitter]) -> Emitter:
    """Return an emitter that shows each region in all of these."""
    return FanOutEmitter(emitters) if len(emitters) > 1 else emitters[0] if emitters else NULL_EMITTER


class _ThreadState(threading.local):
    """How many regions called `backward` are open on this thread."""

    open = 0


NULL_EMITTER = NullEmitter()
NO_TOKEN: Token = (NULL_EMITTER.pop, None)  # closes nothing
_state = _ThreadState()
recording = False
detailed = False  # an active emitter shows more than the phases of a step
current: Emitter = NULL_EMITTER  # receives the regions
compiled_away: set[str] = set()  # names of regions inside compiled code
_logged: set[str] = set()  # the names that were logged
MAX_LOGGED_NAMES = 10  # names in one line of the log


def tracing() -> bool:
    """Return whether Dynamo traces the caller; replaced by torch's own function once torch is imported."""
    return False


def hide(name: str) -> None:
    """Note that the region ``name`` is inside compiled code, where no profiler will see it.

    Dynamo calls this while it traces and keeps it out of the graph, because of the attribute below
    (`torch.compiler.assume_constant_result`).
    """
    compiled_away.add(name)


hide._dynamo_marked_constant = True  # type: ignore[attr-defined]


def log_hidden() -> None:
    """Log which regions are inside compiled code, each name once."""
    names = sorted(compiled_away - _logged)
    if names:
        _logged.update(names)
        shown = [
            *names[:MAX_LOGGED_NAMES],
            *([f"{len(names) - MAX_LOGGED_NAMES} more"] if len(names) > MAX_LOGGED_NAMES else []),
        ]
        log.info("regions inside compiled code are not recorded; annotate around the compiled call", regions=shown)


def try_emit(
    emitter: Emitter, begin: Callable[[Region], Any], close: Callable[[Any], None], region: Region
) -> Token:
    """Begin ``region`` in ``emitter``; drop the emitter if that fails."""
    try:
        return close, begin(region)
    except Exception as error:
        return drop_failed(emitter, error)


def drop_failed(emitter: Emitter, error: Exception) -> Token:
    """Drop ``emitter`` after an error; the region that it failed to open has nothing to close."""
    if is_interrupt(error):
        raise error
    try:
        active.drop(emitter, error)
    except Exception as another:
        if another is error:
            raise
        guard.failed(f"emitter {emitter.name}", another)
    return NO_TOKEN


def enter(region: Region) -> Token:
    """Open ``region`` in every active emitter; close it with `leave` on the same thread, innermost first."""
    emitter = current
    try:
        token = emitter.pop, emitter.push(region)
    except Exception as error:
        token = drop_failed(emitter, error)
    if region.is_backward:
        _state.open += 1
        return _leave_backward, token
    return token


def _leave_backward(token: Token) -> None:
    _state.open -= 1
    token[0](token[1])


def backward_is_open() -> bool:
    """Return whether a region called `backward` is open on this thread."""
    return _state.open > 0


def enter_without_torch(region: Region) -> Token:
    """Like `enter`, but skip emitters that already show torch's own range of this name."""
    others = [emitter for emitter in listening() if emitter.name != "torch"]
    if profilers.running():
        pairs = [(emitter, {"torch", emitter.name}) for emitter in others]
        others = [emitter for emitter, pair in pairs if not pair & redundant(list(pair), active._target)]
    return enter_in(others, region)


def listening() -> Sequence[Emitter]:
    """Return the active emitters."""
    return current._emitters if isinstance(current, FanOutEmitter) else [current]


def enter_in(emitters: Sequence[Emitter], region: Region) -> Token:
    """Like `enter`, but only for these emitters."""
    shown = joined(emitters)
    return try_emit(shown, shown.push, shown.pop, region)


def start(region: Region) -> Token:
    """Like `enter`, but other regions may overlap this one: for code that is suspended."""
    emitter = current
    try:
        return emitter.end, emitter.start(region)
    except Exception as error:
        return drop_failed(emitter, error)


def leave(token: Token) -> None:
    """Close the region that `enter` or `start` opened, whichever emitters are active by now."""
    try:
        token[0](token[1])
    except Exception as error:
        guard.failed("closing a region", error)


def mark(region: Region) -> None:
    """Show an instant in every active emitter."""
    emitter = current
    try_emit(emitter, emitter.mark, NULL_EMITTER.pop, region)


class ActiveEmitters:
    """The emitters that are active, and why each is."""

    def __init__(self) -> None:
        self._attached: list[Emitter] = []  # their tool was attached when the process started
        self._recording: list[Emitter] = []  # while a torch profiler records: the emitters for torch and for JAX
        self._added: list[Emitter] = []  # by other parts of the library, from `add` to `remove`
        self._coarse: list[Emitter] = []  # likewise; they need only the phases of a step
        self._failed: set[str] = set()  # the names of emitters that were dropped
        self._target = ""
        self._following_torch = False
        self._patches: list[Patch] = []  # stay until the process ends: they call the original
        self._warm_ups: set[object] = set()  # recordings in warm-up, which start at a later step
        self.observers: list[Callable[[], None]] = []  # called when a recording warms up, starts or stops

    def _refresh(self) -> None:
        """Rebuild the set of emitters, so that each region goes to every profiler once."""
        global recording, detailed, current
        before = recording
        emitters = [*self._attached, *self._recording, *self._added]
        detailed = bool(emitters)
        emitters += self._coarse
        drop = redundant([emitter.name for emitter in emitters], self._target)
        emitters = [emitter for emitter in emitters if emitter.name not in drop]
        current = joined(emitters)
        recording = bool(emitters)
        if recording or before:
            self._notify()

    def _notify(self) -> None:
        for observer in self.observers:
            with guard.contained("following the profilers"):
                observer()

    @property
    def notes(self) -> RecordingNotes | None:
        """The notes of the recording of torch's profiler; None without one."""
        notes = (emitter.notes for emitter in self._recording if isinstance(emitter, TorchProfilerEmitter))
        return next(notes, None)

    @property
    def warm_up_count(self) -> int:
        """The number of recordings in warm-up."""
        return len(self._warm_ups)

    def begin_warm_up(self, warm_up: object) -> None:
        """Note that a recording is in warm-up, for which modules get hooks; further calls do nothing."""
        if warm_up not in self._warm_ups:
            self._warm_ups.add(warm_up)
            self._notify()

    def end_warm_up(self, warm_up: object) -> None:
        """Note that a recording has started or was given up; may be called again, as after an interrupt."""
        self._warm_ups.discard(warm_up)
        if not recording:
            self._notify()

    def drop(self, emitter: Emitter, error: Exception) -> None:
        """Drop a failing emitter; the one for torch is tried again with the next recording."""
        if isinstance(error, (MemoryError, RecursionError)):  # the program's error: only this region is not shown
            guard.note(f"emitter {emitter.name}", error)
        else:
            self._attached = [other for other in self._attached if other is not emitter]
            self._recording = [other for other in self._recording if other is not emitter]
            self._discard(emitter)
            self._failed.add(emitter.name)
            self._refresh()
            guard.failed(f"emitter {emitter.name}", error)

    def add(self, emitter: Emitter, *, detailed: bool = True) -> None:
        """Send regions to ``emitter`` until `remove`.

        Args:
            emitter: the emitter.
            detailed: it shows any region; else only the phases of a step, for which modules get no hooks.
        """
        (self._added if detailed else self._coarse).append(emitter)
        self._refresh()

    def remove(self, emitter: Emitter) -> None:
        """Stop sending regions to ``emitter``; a second call does nothing."""
        self._discard(emitter)
        self._refresh()

    def _discard(self, emitter: Emitter) -> None:
        self._added = [other for other in self._added if other is not emitter]
        self._coarse = [other for other in self._coarse if other is not emitter]

    def detect(self) -> None:
        """Detect the tools that this process runs under; called again when a window opens."""
        self._attached = attached(self._attached, self._failed)
        self._refresh()

    @guard.contained("detecting profilers")
    def on_configured(self) -> None:
        """Attach the emitters that the settings name, also those that failed before."""
        self._failed.clear()
        self.detect()

    @guard.contained("following torch's profiler")
    def follow_torch(self, torch: Any) -> None:
        """Follow torch's profilers and compiler from now on."""
        global tracing
        if not self._following_torch:
            self._following_torch = True
            tracing = torch.compiler.is_dynamo_compiling
            apply(profilers.profiler_patches(self._on_profiler_start, self._on_profiler_stop), self._patches)
            if self._patches and (target := profilers.running_target()) is not None:
                self._on_profiler_start(target, None)

    @guard.contained("following torch's profiler")
    def _on_profiler_start(self, target: str, profiler: Any) -> None:
        """Note that a torch profiler is about to record."""
        self._target, self._recording = target, []
        with guard.contained("following torch's profiler"):
            NestedTorchProfilerEmitter.end_all()  # the ranges of a recording that this one replaces
            auto = settings.emitters == "auto"
            if auto or "torch" in settings.emitters:
                self._recording.append(torch_emitter(profiler))
            if auto and sys.modules.get("jax") is not None and "jax" not in self._failed:
                self._recording.append(JaxEmitter())
        self._refresh()

    @guard.contained("following torch's profiler")
    def _on_profiler_stop(self) -> None:
        """Note that the torch profiler stopped recording."""
        self._recording = []
        with guard.contained("following torch's profiler"):
            self._refresh()
        NestedTorchProfilerEmitter.end_all()

    def check(self) -> None:
        """Check whether torch's profiler stopped unnoticed, as when an interrupt prevents its notification."""
        if not profilers.running():
            self._on_profiler_stop()


active = ActiveEmitters()


@guard.contained("detecting profilers")
def _listen() -> None:
    """Follow torch, now or once it is imported, and the tools that this process runs under."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "compiler"):
        active.follow_torch(torch)
    else:
        ImportHook("torch", active.follow_torch).apply()
    launches = LaunchRegions(enter_in, leave)
    active.observers.append(lambda: launches.show_in(listening()))
    ImportHook("triton.compiler.compiler", launches.follow).apply()
    ImportHook("triton.profiler.profile", ProtonSessions(active.add, active.remove).follow).apply()
    settings.listeners.append(active.on_configured)
    active.detect()


if settings.enabled:
    _listen()
