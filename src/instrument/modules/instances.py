"""Labels for the optimizers and data loaders of a program that has several of one class."""

from __future__ import annotations

import sys
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

    def find_existing(self) -> None:
        """Find the existing instances when a recording begins."""
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
        """Return ``[actor_optimizer]`` if several instances are of this class, else "".

        An instance keeps its suffix: the first one without a label has none, the next ones a number.
        """
        if instance is None:
            return ""
        if instance not in self._labels:
            same = [known for known in self._known if type(known) is type(instance) and known is not instance]
            if same and instance not in self._known:  # new, or held by a function that has just begun
                self._labels.label_against(instance, same)
            self._known.add(instance)
            if instance not in self._labels:
                taken = {self._labels.of(other) for other in same if other in self._labels}
                numbers = ("", *map(str, range(1, len(same) + 1)))
                self._labels.set_label(instance, next(number for number in numbers if number not in taken))
        label = self._labels.of(instance)
        return f"[{label}]" if label else ""


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
                for named in (loader, iterator):
                    self._labels.set_label(named, self._labels.of(loader))
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
