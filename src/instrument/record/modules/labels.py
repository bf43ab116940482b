"""Labels for objects with the same name: models, optimizers, data loaders; from the variable that holds each."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ...base.compat import training
from ...base.live_objects import IdentitySet

_MAX_FRAMES_OR_ITEMS = 100
_MAX_VALUES = 20_000  # values
_MAX_NAMES = 3  # agent.policy.actor
_INSTALLED = ("site-packages", "dist-packages")  # in the paths of installed packages
_PACKAGE = __name__.partition(".")[0]
_CONTAINERS = (list, tuple)


class Labels:
    """Labels objects of the same name: ``actor``, ``agent.critic``, otherwise ``0`` and ``1``.

    A label is looked up once, and stays with its object for the object's lifetime.

    Args:
        depth: how many names a label has at most.
        frameworks: whether variables of installed packages count as well.

    Attributes:
        budget: how many values all further searches together may inspect, about 1 us each.
    """

    def __init__(self, depth: int = _MAX_NAMES, *, frameworks: bool = True) -> None:
        self.budget = sys.maxsize
        self._depth = depth
        self._frameworks = frameworks
        self._known: dict[int, tuple[weakref.ref[Any], str]] = {}

    def __contains__(self, thing: object) -> bool:
        return id(thing) in self._known

    def of(self, thing: object) -> str:
        """Return the label of ``thing``, "" if it has none."""
        return self._known[id(thing)][1] if thing in self else ""

    def label_all(self, things: Sequence[Any], *, numbers: bool = True) -> None:
        """Give each of ``things``, which share a name, its own label; do nothing for a single one.

        With ``numbers=False``, skip those that no variable of a running function leads to.
        """
        missing = [thing for thing in things if thing not in self]
        if len(things) < 2 or not missing:
            return
        taken = {self.of(thing) for thing in things}
        paths = self._paths(missing)
        if not numbers:
            missing = [thing for thing in missing if id(thing) in paths]
            if len(missing) + sum(thing in self for thing in things) < 2:
                return
        for thing in missing:
            label = paths.get(id(thing), "")
            if not label or label in taken:
                label = next(str(number) for number in range(len(things) + 1) if str(number) not in taken)
            taken.add(label)
            self.set_label(thing, label)

    def label_against(self, thing: Any, others: Iterable[Any]) -> None:
        """Give ``thing`` a label that none of ``others`` has, if a variable of a running function leads to it."""
        label = self._paths([thing]).get(id(thing), "")
        if label and label not in map(self.of, others):
            self.set_label(thing, label)

    def set_label(self, thing: Any, label: str) -> None:
        """Give ``thing`` the label ``label`` until it is deleted."""
        # The callback is a method of dict, as errors in a callback cannot be contained. The reference becomes the
        # default of `pop`.
        self._known[id(thing)] = weakref.ref(thing, functools.partial(self._known.pop, id(thing))), label

    def instances_in_variables(self, kind: type) -> list[Any]:
        """Return the instances of ``kind`` that variables of the running functions lead to; at most 15 ms."""
        instances = self._search(lambda value: issubclass(type(value), kind), _MAX_VALUES)
        return [value for _, value in instances.values()]

    def _paths(self, things: Sequence[object]) -> dict[int, str]:
        """Return the shortest path to each of ``things`` from a variable of a running function, by its id."""
        wanted = {id(thing) for thing in things}
        held = self._search(lambda value: id(value) in wanted, len(wanted))
        return {key: path.removeprefix("self.") for key, (path, _) in held.items()}

    def _search(self, wanted: Callable[[object], bool], max_found: int) -> dict[int, tuple[str, object]]:
        """Return the ``wanted`` objects, at most ``max_found``, with the shortest path to each, by its id."""
        paths, seen = dict[int, tuple[str, object]](), set[int]()
        namespaces = [*_namespaces(self._frameworks)]
        if outermost := self.budget >= _MAX_VALUES:  # `opt_d` of a caller says more than `optimizer` of a function
            namespaces.reverse()
        level: Iterator[tuple[str, object]] = (
            (name, value)
            for variables in namespaces
            for name, value in variables.items()
            if not name.startswith("__")
        )
        end = max(self.budget - _MAX_VALUES, 0)
        for _ in range(self._depth):
            below = []
            for path, value in level:
                self.budget -= 1
                if wanted(value):
                    paths.setdefault(id(value), (path, value))
                elif id(value) not in seen:
                    seen.add(id(value))
                    below.append((path, value))
                if len(paths) == max_found or self.budget <= end:
                    return paths
            if outermost:  # but `self.optimizer` is shorter than `trainer.optimizer`
                below.reverse()
                outermost = False
            level = ((path, held) for above, value in below for path, held in children(above, value))
        return paths


def children(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the items or attributes of ``value``, without calling any of its methods."""
    kind = type(value)
    if kind is dict:
        for key, held in value.items() if len(value) < _MAX_FRAMES_OR_ITEMS else ():  # type: ignore[attr-defined, arg-type]
            if isinstance(key, (str, int)):
                yield f"{path}[{key}]", held
    elif kind in _CONTAINERS:
        for number, held in enumerate(value[:_MAX_FRAMES_OR_ITEMS]):  # type: ignore[index]
            yield f"{path}[{number}]", held
    elif not issubclass(kind, (type, ModuleType)) and str(kind.__module__).partition(".")[0] != _PACKAGE:
        held_by = getattr(value, "__dict__", None) if kind.__getattribute__ is object.__getattribute__ else None
        for name, held in list(held_by.items()) if type(held_by) is dict else ():
            yield f"{path}.{name}", held


def _namespaces(frameworks: bool) -> Iterator[dict[str, Any]]:
    """Yield the variables of the running functions, innermost first, and of their modules.

    Without ``frameworks``, leave out functions of installed packages.
    """
    frame: FrameType | None = sys._getframe(1)
    seen = set[int]()
    for _ in range(_MAX_FRAMES_OR_ITEMS):
        if frame is None:
            return
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        installed = any(part in frame.f_code.co_filename for part in _INSTALLED)
        if package not in (_PACKAGE, "torch") and (frameworks or not installed):
            yield _variables(frame)
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                yield dict(frame.f_globals)
        frame = frame.f_back


def _variables(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the variables of ``frame``.

    Up to Python 3.12, ``f_locals`` of a function is the dictionary that ``locals()`` returns there, and keeps the
    variables alive until the function returns. It is emptied again, unless the function itself holds it.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:  # a module, whose variables are in the dictionary itself
        return dict(frame.f_locals)
    if "locals" in code.co_names:
        return {}
    shown = frame.f_locals
    variables = dict(shown)
    if type(shown) is dict and sys.getrefcount(shown) <= 3:  # the frame, this function and the call
        shown.clear()
    return variables


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
        for instance in self._labels.instances_in_variables(self._base):
            if hasattr(instance, self._attribute):
                self._known.add(instance)
        for instance in self._distinct_instances():
            named[type(instance).__name__].append(instance)
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
            same = [other for other in self._known if type(other) is type(instance) and other is not instance]
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
