"""The optimizers of the program, told apart where several are of one class."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from typing import Any

from torch.optim import Optimizer

from ..identity import IdentitySet
from .labels import Labels


class Optimizers:
    """Knows the optimizers that there are, and what follows the name of each."""

    def __init__(self) -> None:
        self._known = IdentitySet()
        self._labels = Labels()
        self._complete = False  # no other one was seen since the last look
        self._unheld: dict[str, list[weakref.ref[Any]]] = {}  # by class: those without a label that were named

    def look(self) -> None:
        """Find the optimizers that there are, as a recording begins."""
        self._unheld.clear()
        if not self._complete:
            self._find()

    def _find(self) -> None:
        """Look among all objects of the process: 10 ms for a million."""
        self._complete = True
        kinds, pending = set[type](), [Optimizer]
        while pending:
            kind = pending.pop()
            if kind not in kinds:
                kinds.add(kind)
                pending += kind.__subclasses__()
        named: dict[str, list[Any]] = defaultdict(list)
        for found in gc.get_objects():
            if type(found) in kinds and hasattr(found, "param_groups"):
                named[type(found).__name__].append(found)
                self._known.add(found)
        for same in named.values():
            self._labels.tell_apart(same, numbers=False)

    def suffix(self, optimizer: Any) -> str:
        """Return ``[actor_optimizer]`` if several optimizers are of this class, else ""."""
        if optimizer is None:
            return ""
        if optimizer not in self._known:  # made since
            self._find()
        label = self._labels.of(optimizer) or self._number(optimizer)
        return f"[{label}]" if label else ""

    def _number(self, optimizer: Any) -> str:
        """Return ``1`` for the second of a class that this recording names and that has no label, and so on."""
        same = self._unheld.setdefault(type(optimizer).__name__, [])
        at = next((at for at, known in enumerate(same) if known() is optimizer), len(same))
        if at == len(same):
            same.append(weakref.ref(optimizer))
        return str(at or "")


optimizers = Optimizers()
