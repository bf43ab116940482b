"""Selects the modules of a model that become regions, and their names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..interrupts import is_interrupt
from .compiling import bypasses_inner_hooks, compiled_from

Rule = str | re.Pattern[str] | type | Callable[[str, nn.Module], object]
Rules = Rule | Iterable[Rule]

PLACES = 64  # places per module that are searched: shared modules can have very many
NAMES = ("path", "class", "both")
WRAPPED = ("module", "model", "base_model")  # the attributes by which wrappers such as DDP and PEFT hold a model
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, eq=False)
class Place:
    """The place of a module in a model.

    Attributes:
        path: its qualified name, "" for the model itself.
        module: the module, which may be at several places.
        parent: the place of the module that holds it.
        hidden: inside compiled code, where no hook runs.
        level: how many levels it is below the model, as in `Selection.depth`.
    """

    path: str
    module: nn.Module
    parent: Place | None
    hidden: bool = False
    level: int = 0


def places(model: nn.Module) -> Iterator[Place]:
    """Yield the place of ``model`` and every place below it, parents first; cycles are entered once."""
    todo = [Place("", model, None)]
    entered: Counter[int] = Counter()
    while todo:
        place = todo.pop()
        yield place
        entered[id(place.module)] += 1
        if entered[id(place.module)] > PLACES:
            continue
        inside, above = place.hidden or bypasses_inner_hooks(place.module), place
        around = {id(place.module)}
        while above.parent is not None:
            above = above.parent
            around.add(id(above.module))
        todo += [
            Place(f"{place.path}.{name}" if place.path else name, child, place, inside, _level(place, name, child))
            for name, child in reversed(compiled_from(place.module)._modules.items())
            if child is not None and id(child) not in around
        ]


def has_forward(module: nn.Module) -> bool:
    """Return whether the module has a forward, unlike a `ModuleList`."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _level(parent: Place, name: str, child: nn.Module) -> int:
    """Return the level of a child: modules that nobody calls, and wrappers that only hold the model, add none."""
    wrapped = not parent.level and name in WRAPPED and len(compiled_from(parent.module)._modules) == 1
    return parent.level + (has_forward(compiled_from(child)) and not wrapped)


class Selection:
    """The modules that a call of `annotate_modules` selects.

    Attributes:
        depth: the number of levels below the model. A module without a forward, such as a `ModuleList`, is no
            level, nor is a wrapper that holds only the model.

    Raises:
        TypeError, ValueError: an argument that is not accepted.
    """

    def __init__(
        self, depth: int | None, include: Rules | None, exclude: Rules | None, skip_containers: bool, names: str
    ):
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
            raise ValueError(f'"depth" must be an integer >= 0, or None: {depth!r}')
        if names not in NAMES:
            raise ValueError(f'"names" must be one of {", ".join(NAMES)}: {names!r}')
        self.depth = depth
        self.include = None if include is None else _rules("include", include)
        self.exclude = _rules("exclude", () if exclude is None else exclude)
        self.skip_containers = skip_containers
        self.names = names

    def check(self, model: nn.Module) -> None:
        """Raise ``ValueError`` if a rule matches no module of ``model``."""
        known = list(places(model))
        for argument, rules in (("include", self.include or ()), ("exclude", self.exclude)):
            for rule in rules:
                if not any(_matches(rule, place) for place in known):
                    raise ValueError(f'"{argument}" matches no module: {rule!r}; {_suggestion(rule, known)}')
        if not any(self.is_selected(place) for place in known):
            raise ValueError("include, exclude, depth and skip_containers together leave no module")

    def is_selected(self, place: Place) -> bool:
        """Return whether the module at ``place`` becomes a region."""
        if self.depth is not None and place.level > self.depth:
            return False
        if self.skip_containers and isinstance(compiled_from(place.module), CONTAINERS):
            return False
        if self.include is not None and not any(_matches(rule, place) for rule in self.include):
            return False
        return not any(_matches(rule, place) for rule in self.exclude)

    def name(self, place: Place) -> str:
        """Return the name of the region; the model itself is named after its class."""
        kind = class_name(place.module)
        if not place.path or self.names == "class":
            return kind
        return place.path if self.names == "path" else f"{place.path}: {kind}"


def class_name(module: nn.Module) -> str:
    """Return the name of the module's class; for a `torch.jit.ScriptModule`, of the class that was scripted."""
    if isinstance(module, torch.jit.ScriptModule):
        return str(module.original_name)
    return type(compiled_from(module)).__name__


def _rules(argument: str, given: Any) -> tuple[Rule, ...]:
    several = isinstance(given, Iterable) and not isinstance(given, (str, type)) and not callable(given)
    rules = tuple(given) if several else (given,)
    for rule in rules:
        module = isinstance(rule, nn.Module)
        if module or not (isinstance(rule, (str, re.Pattern)) or callable(rule)):
            raise TypeError(
                f'"{argument}" must be a pattern such as "encoder.layers.*", a compiled regular expression, '
                f"a class of modules, a function of a name and a module, or several of these: {rule!r}"
            )
    return rules


def _matches(rule: Rule, place: Place) -> bool:
    if isinstance(rule, str):
        return fnmatch.fnmatchcase(place.path, rule)
    if isinstance(rule, re.Pattern):
        return rule.search(place.path) is not None
    if isinstance(rule, type):
        return isinstance(compiled_from(place.module), rule)
    try:
        return bool(rule(place.path, place.module))
    except Exception as error:
        if is_interrupt(error):
            raise
        raise ValueError(f"{rule!r}, which selects modules, failed for {place.path!r}: {error!r}") from error


def _suggestion(rule: Rule, known: list[Place]) -> str:
    if isinstance(rule, type):
        return f"it has {', '.join(sorted({class_name(place.module) for place in known}))}"
    text = rule if isinstance(rule, str) else getattr(rule, "pattern", "")
    paths = [place.path for place in known if place.path]
    close = difflib.get_close_matches(text, paths, 3, 0.3) or paths[:3]
    return f"the nearest are {', '.join(close)}" if close else "the model has no modules inside"
