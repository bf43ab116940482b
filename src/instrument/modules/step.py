"""`annotate_step`: what a training step does around the model becomes regions."""

from __future__ import annotations

from ..patch import Patch, apply, undo
from .parts import PARTS, Switch
from .service import Handle, Service, served


class Request:
    """Which parts somebody asked for."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts = parts

    def __str__(self) -> str:
        return ", ".join(self.parts)


class Patcher(Service[Request]):
    """Has the parts patched that somebody asked for, each once."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: set[str] = set()
        self._patches: list[Patch] = []
        self._switch = Switch()

    def apply(self, on: bool) -> None:
        """Patch what is asked for now; put back what was."""
        parts = {part for request in self.requests for part in request.parts} if on else set()
        if parts == self._parts and (parts or not self._patches):
            return
        self._switch.on, self._parts = False, set()
        undo(self._patches)
        self._switch, self._parts = Switch(), parts
        for part in PARTS:
            if part in parts:
                apply(PARTS[part](self._switch), self._patches)


patcher = Patcher()


@served
def annotate_step(*parts: str) -> Handle[Request]:
    """Make what a training step does around the model regions, in every profiler that listens.

    Nothing is patched but while a profiler records or a tool is attached. Results stay as they are, and so
    does compiled code, inside which nothing is named.

    Args:
        *parts: which of these, all of them if none is given:

            - "optimizer": each optimizer's ``step`` and ``zero_grad``, and "data": the ``__next__`` of a
              `torch.utils.data.DataLoader`. torch.profiler names them by itself
              (``Optimizer.step#AdamW.step``); this shows them in the other profilers, under the same names.
            - "backward": ``loss.backward()`` and `torch.autograd.backward` as a whole.
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
    return patcher.add(Request(parts or tuple(PARTS)))
