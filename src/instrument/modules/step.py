"""`annotate_step`: regions for the parts of a training step outside the model."""

from __future__ import annotations

from typing import Any

from ..patch import Patch, apply, undo
from ..regions import dispatch
from .parts import PARTS, PHASES, RANGES, Switch
from .service import Handle, PatchService, contain_request
from .uncompiled import skip_package


class StepAnnotation:
    """The parts that one call of `annotate_step` requested."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts = parts

    def __str__(self) -> str:
        return ", ".join(self.parts)


class StepPatcher(PatchService[StepAnnotation]):
    """Patches each requested part once.

    Attributes:
        parts: those that are patched now.
    """

    during_phases = True

    def __init__(self) -> None:
        super().__init__()
        self.parts: frozenset[str] = frozenset()
        self._detailed = False  # whether they are patched for more than the phases of a step
        self._patches: list[Patch] = []
        self._switch = Switch()

    def apply(self, on: bool) -> None:
        """Patch the parts that are requested now, and undo the others."""
        parts = frozenset(part for request in self.requests for part in request.parts if on)
        detailed = dispatch.detailed
        if not detailed:
            parts &= PHASES
        if (parts, detailed) == (self.parts, self._detailed) and (parts or not self._patches):
            return
        self._switch.on, self.parts = False, frozenset()
        undo(self._patches)
        self._switch, self.parts, self._detailed = Switch(), parts, detailed
        for part in PARTS:
            if part in parts:
                apply(PARTS[part](self._switch), self._patches)

    def begin_range(self, context: Any, before: frozenset[str]) -> dispatch.Token | None:
        """Open the region of a range that torch enters now, if its part is patched but was not ``before``.

        Such a patch comes too late for the call of ``__enter__`` that is running.
        """
        begun = (RANGES[part](context) for part in self.parts & RANGES.keys() - before)
        return next((token for token in begun if token is not None), None)


patcher = StepPatcher()


@contain_request
def annotate_step(*parts: str) -> Handle:
    """Annotate the parts of a training step outside the model, in every active profiler.

    torch is patched only while a profiler records, a tool is attached or a black box runs. Results and compiled
    code do not change; regions inside compiled code do not appear.

    Args:
        *parts: which parts; all of them if none is given:

            - "optimizer": each optimizer's ``step`` and ``zero_grad``, and "data": the ``__next__`` of a
              `torch.utils.data.DataLoader`. torch.profiler shows these by itself
              (``Optimizer.step#AdamW.step``); this shows them under the same names in the other profilers.
            - "backward": ``loss.backward()`` and `torch.autograd.backward` as a whole.
            - "copies": ``copy to cuda:0``, a copy of a tensor from the CPU to another device by ``to``,
              ``cuda`` or ``copy_``, with its bytes as the payload; also the parameters, in ``model.to(...)``.
            - "clipping": `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.
            - "collectives": ``all_reduce``, ``broadcast`` and the other collectives of `torch.distributed`:
              the call that starts one, not the wait for it, and not those that DDP starts in C++.

    Returns:
        A handle with ``remove()``; it is a context manager as well.

    Raises:
        TypeError: a part is not a string.
        ValueError: a part has another name.

    Example:
        >>> handle = annotate_step("optimizer", "data")
        >>> handle.remove()
    """
    for part in parts:
        if not isinstance(part, str):
            raise TypeError(f'"parts" must be strings from {", ".join(PARTS)}: {part!r}')
        if part not in PARTS:
            raise ValueError(f'"parts" must be from {", ".join(PARTS)}: {part!r}')
    skip_package()  # torch's own functions call the patched ones between two graphs
    return patcher.add(StepAnnotation(parts or tuple(PARTS)))
