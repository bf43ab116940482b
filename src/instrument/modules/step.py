"""`annotate_step`: what a training step does around the model becomes regions."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator

from .. import compat
from ..config import settings
from ..patch import Patch
from ..regions import live
from .compiling import compiling
from .parts import PARTS, Switch


class Handle:
    """What `annotate_step` returns; as a context manager it removes itself at the end of the block."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return f"<regions of {', '.join(self.parts)}>"

    def remove(self) -> None:
        """Put back what no other handle asked for, now and for good; once more does nothing."""
        patcher.discard(self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Patcher:
    """Has the parts patched that some handle asked for, each once, while somebody listens."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []
        self._parts: set[str] = set()
        self._patches: list[Patch] = []
        self._switch = Switch()
        self._suspended = 0
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._lock = threading.RLock()  # a thread that is not in this process may hold the old one

    def add(self, handle: Handle) -> None:
        """Serve ``handle`` from now on."""
        with self._lock:
            if self.settle not in live.live.observers:
                live.live.observers.append(self.settle)
                atexit.register(self.clear)
                compat.when_imported("torch._dynamo", lambda _: self.settle())
            self._handles.append(handle)
            self.settle()

    def discard(self, handle: Handle) -> None:
        """Serve ``handle`` no more."""
        with self._lock:
            if handle in self._handles:
                self._handles.remove(handle)
                self.settle()

    def clear(self) -> None:
        """Leave no patch anywhere."""
        with self._lock:
            self._handles.clear()
            self.settle()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Nothing is patched inside: torch compiles, and would take the patches for its own methods."""
        with self._lock:
            self._suspended += 1
            self._patch(set())
        try:
            yield
        finally:
            with self._lock:
                self._suspended -= 1
                self.settle()

    def settle(self) -> None:
        """Patch what is asked for now; put back what was."""
        with self._lock:
            wanted = {part for handle in self._handles for part in handle.parts} if live.recording else set()
            compiling.tell(self.suspended, bool(wanted))
            if not self._suspended:
                self._patch(wanted)

    def _patch(self, parts: set[str]) -> None:
        if parts != self._parts:
            self._switch.on = False
            while self._patches:
                self._patches.pop().undo()
            self._switch, self._parts = Switch(), parts
            for part in PARTS:
                if part in parts:
                    self._patches += PARTS[part](self._switch)


patcher = Patcher()


def annotate_step(*parts: str) -> Handle:
    """Make what a training step does around the model regions, in every profiler that listens.

    Nothing is patched but while a profiler records or a tool is attached. Results stay as they are, and so
    does compiled code, inside which nothing is named.

    Args:
        *parts: which of these, all of them if none is given:

            - "optimizer": each optimizer's ``step`` and ``zero_grad``, and "data": the ``__next__`` of a
              `torch.utils.data.DataLoader`. torch.profiler names them by itself
              (``Optimizer.step#AdamW.step``); this shows them in the other profilers, under the same names.
            - "copies": ``copy to cuda:0``, a tensor that goes from the CPU to another device by ``to``,
              ``cuda`` or ``copy_``, with its bytes as the payload; also the parameters, in ``model.to(...)``.
            - "clipping": `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.
            - "collectives": ``all_reduce``, ``broadcast`` and the others of `torch.distributed`, the call that
              starts one, not the wait for it; not those that DDP starts in C++.

    Returns:
        A handle with ``remove()``, which is a context manager as well.

    Raises:
        TypeError: a part that is no string.
        ValueError: a part of another name.

    Example:
        >>> handle = annotate_step("optimizer", "data")
        >>> handle.remove()
    """
    for part in parts:
        if not isinstance(part, str):
            raise TypeError(f'"parts" must be strings out of {", ".join(PARTS)}: {part!r}')
        if part not in PARTS:
            raise ValueError(f'"parts" must be out of {", ".join(PARTS)}: {part!r}')
    handle = Handle(parts or tuple(PARTS))
    if settings.enabled:
        patcher.add(handle)
    return handle
