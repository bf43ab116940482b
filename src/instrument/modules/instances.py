"""Labels for the optimizers and data loaders of a program that has several of one class."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..compat import training
from ..identity import IdentitySet
from .labels import Labels

_MAX_VALUES_IN_RECORDING = 2_000  # values that all searches in one recording may inspect: 2 ms


class Instances:
    """The instances of a class that the program holds in variables, with a label for each.

    Args:
        base: the class; instances of its subclasses are included.
        attribute: what an instance has once it is made.
        labels: how they are labelled.
    """

    def __init__(self, base: type, attribute: str, labels: Labels) -> None:
        self._base = base
        self._attribute = attribute
        self._known = IdentitySet()
        self._labels = labels
        self._numbered: dict[str, list[weakref.ref[Any]]] = {}  # by class: named instances without a label

    def find_existing(self) -> None:
        """Find the existing instances when a recording begins."""
        self._numbered.clear()
        self._labels.budget = sys.maxsize
        try:
            self._find()
        finally:
            self._labels.budget = _MAX_VALUES_IN_RECORDING

    def _find(self) -> None:
        """Search the variables of the running functions: 0.1 ms, at most 15 ms if they hold many values."""
        named: dict[str, list[Any]] = defaultdict(list)
        for found in self._labels.instances_in_variables(self._base):
            if hasattr(found, self._attribute):
                self._known.add(found)
        for known in self._distinct_instances():
            named[type(known).__name__].append(known)
        for same in named.values():
            self._labels.label_all(same, numbers=False)

    def _distinct_instances(self) -> Iterable[Any]:
        """Return the instances that need labels."""
        return self._known

    def suffix(self, instance: Any) -> str:
        """Return ``[actor_optimizer]`` if several instances are of this class, else ""."""
        if instance is None:
            return ""
        if instance not in self._known:  # new, or held by a function that has just begun
            same = [known for known in self._known if type(known).__name__ == type(instance).__name__]
            self._known.add(instance)
            if same:
                self._labels.label_against(instance, same)
        label = self._labels.of(instance) or self._number(instance)
        return f"[{label}]" if label else ""

    def _number(self, instance: Any) -> str:
        """Return a number for an instance without a label: "" for the first in this recording, then 1.

        The number of a deleted instance is used again.
        """
        same = self._numbered.setdefault(type(instance).__name__, [])
        held = [known() for known in same]
        at = next((at for at, known in enumerate(held) if known is instance), -1)
        if at < 0:
            at = next((at for at, known in enumerate(held) if known is None), len(same))
            same[at : at + 1] = [weakref.ref(instance)]
        return str(at or "")


class Loaders(Instances):
    """Names data loaders by their iterators, which do not keep them alive.

    Covers only loaders that the program itself holds: frameworks have regions around their loops over data.
    """

    def __init__(self) -> None:
        super().__init__(DataLoader, "sampler", Labels(2, frameworks=False))
        self._iterators = IdentitySet()  # those whose loader was searched for

    def suffix(self, iterator: Any) -> str:
        """Return ``[train_loader]`` if several loaders are of the class of the one iterated over, else "".

        A loader that nothing holds by a name, as in ``for batch in DataLoader(...)``, has none.
        """
        if iterator is None:
            return ""
        if iterator not in self._iterators:
            self._iterators.add(iterator)
            loader = self._loader(iterator)
            if loader is None:  # new, or deleted
                self._find()
                loader = self._loader(iterator)
            if loader is not None:
                self._labels.set_label(iterator, self._labels.of(loader))
        label = self._labels.of(iterator)
        return f"[{label}]" if label else ""

    def _distinct_instances(self) -> Iterable[Any]:
        """Return one loader for each sampler, as frameworks wrap the loaders of the program."""
        return {id(training.index_sampler(loader)): loader for loader in reversed([*self._known])}.values()

    def _loader(self, iterator: Any) -> Any:
        sampler = training.index_sampler(iterator)
        return next(
            (loader for loader in self._distinct_instances() if training.index_sampler(loader) is sampler), None
        )


optimizers = Instances(Optimizer, "param_groups", Labels())
loaders = Loaders()
