"""`StepRegions`: regions of the modules of models, and of the other parts of a step, while a profile runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...base.guard import guard
from ...base.live_objects import IdentitySet

if TYPE_CHECKING:
    from torch import nn

DEPTH = 4
"""How many levels of modules below a model are regions, unless the user says."""
STEP_PARTS = ("optimizer", "data", "backward", "clipping", "collectives")
"""The parts of a step that are regions beside the modules."""


def models_in(modules: nn.Module | Iterable[nn.Module] | None) -> list[nn.Module]:
    """Return the models that the argument ``modules`` names.

    Raises:
        TypeError: it is neither a module nor several.
    """
    if modules is None:
        return []
    kind = getattr(sys.modules.get("torch.nn"), "Module", ())  # without torch there is no module
    several = not isinstance(modules, kind) and isinstance(modules, Iterable) and not isinstance(modules, str)
    models = list(modules) if several else [modules]  # type: ignore[arg-type]
    if not all(isinstance(model, kind) for model in models):
        raise TypeError(f'"modules" must be a torch.nn.Module, or several: {modules!r:.200}')
    return models  # type: ignore[return-value]


class StepRegions:
    """Annotates models and their steps from `attach` to `remove`; keeps no model alive."""

    def __init__(self) -> None:
        self._models = IdentitySet()
        self._attached = IdentitySet()
        self._handles: list[Any] = []

    def add(self, models: Iterable[nn.Module]) -> None:
        """Annotate ``models`` as well, from the next `attach` on."""
        for model in models:
            self._models.add(model)

    @guard.contained("annotating modules")
    def attach(self) -> None:
        """Annotate the models that are not annotated yet."""
        new = [model for model in self._models if model not in self._attached]
        if not new:
            return
        from ..modules.installer import annotate_modules  # imports torch
        from ..modules.parts import annotate_step

        if not self._handles:
            self._handles.append(annotate_step(*STEP_PARTS))
        for model in new:
            self._attached.add(model)
            self._handles.append(annotate_modules(model, DEPTH, names="class"))

    def remove(self) -> None:
        """Undo it; `attach` may follow."""
        self._attached.clear()
        while self._handles:
            self._handles.pop().remove()
