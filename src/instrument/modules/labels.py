"""Labels for objects with the same name: the variable or attribute that holds each in the program."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

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
        found = self._paths(missing)
        if not numbers:
            missing = [thing for thing in missing if id(thing) in found]
            if len(missing) + sum(thing in self for thing in things) < 2:
                return
        for thing in missing:
            label = found.get(id(thing), "")
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
        found = self._search(lambda value: issubclass(type(value), kind), _MAX_VALUES)
        return [value for _, value in found.values()]

    def _paths(self, things: Sequence[object]) -> dict[int, str]:
        """Return the shortest path to each of ``things`` from a variable of a running function, by its id."""
        wanted = {id(thing) for thing in things}
        found = self._search(lambda value: id(value) in wanted, len(wanted))
        return {key: path.removeprefix("self.") for key, (path, _) in found.items()}

    def _search(self, wanted: Callable[[object], bool], max_found: int) -> dict[int, tuple[str, object]]:
        """Return the ``wanted`` objects, at most ``max_found``, with the shortest path to each, by its id."""
        found, seen = dict[int, tuple[str, object]](), set[int]()
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
                    found.setdefault(id(value), (path, value))
                elif id(value) not in seen:
                    seen.add(id(value))
                    below.append((path, value))
                if len(found) == max_found or self.budget <= end:
                    return found
            if outermost:  # but `self.optimizer` is shorter than `trainer.optimizer`
                below.reverse()
                outermost = False
            level = ((path, held) for above, value in below for path, held in _children(above, value))
        return found


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
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
    found = dict(shown)
    if type(shown) is dict and sys.getrefcount(shown) <= 3:  # the frame, this function and the call
        shown.clear()
    return found
