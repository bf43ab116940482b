"""Which modules of a model become regions, their names, and the layers and hooks that each gets as it is now."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from ...base.interrupts import is_interrupt
from ..regions import region
from ..regions.region import DOMAIN, Region
from .compiling import bypasses_inner_hooks, compiled_from
from .module_calls import Layer

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
        all_places = list(places(model))
        for argument, rules in (("include", self.include or ()), ("exclude", self.exclude)):
            for rule in rules:
                if not any(_matches(rule, place) for place in all_places):
                    raise ValueError(f'"{argument}" matches no module: {rule!r}; {_suggestion(rule, all_places)}')
        if not any(self.is_selected(place) for place in all_places):
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


def _suggestion(rule: Rule, all_places: list[Place]) -> str:
    if isinstance(rule, type):
        return f"it has {', '.join(sorted({class_name(place.module) for place in all_places}))}"
    text = rule if isinstance(rule, str) else getattr(rule, "pattern", "")
    paths = [place.path for place in all_places if place.path]
    close = difflib.get_close_matches(text, paths, 3, 0.3) or paths[:3]
    return f"the nearest are {', '.join(close)}" if close else "the model has no modules inside"


class ModelLayout(NamedTuple):
    """The layers and hooks of one model.

    Attributes:
        layers: each module, with the first of its layers.
        hookless: the ids of modules that behave differently when there are hooks on them.
        hidden: the names inside compiled code.
    """

    layers: list[tuple[nn.Module, Layer]]
    hookless: set[int]
    hidden: list[str]


class AnnotatedModel:
    """A model whose modules are to have hooks; it makes the layers, and keeps their regions.

    Attributes:
        model: refers to the model.
        shapes: whether to show the shapes of the inputs.
        label: distinguishes the model from others with its name.
        layers: the first layer of each module, while there are hooks on them.
        was_called: whether a layer was called since the hooks were attached.
    """

    def __init__(self, model: nn.Module, selection: Selection, backward: bool, modes: bool, shapes: bool) -> None:
        self.model = weakref.ref(model)
        self.selection = selection
        self.shapes = shapes
        self.label = ""
        self.layers: list[Layer] = []
        self.was_called = False
        self._backward = backward
        self._modes = modes
        self._region = functools.cache(_new_region)  # profilers prepare each once

    def __str__(self) -> str:
        model = self.model()
        return type(model).__name__ if model is not None else "a deleted model"

    def lay_out(self, model: nn.Module, taken: dict[int, Layer]) -> ModelLayout:
        """Return the plan for ``model``, as it is now.

        Args:
            model: the model.
            taken: the layers of modules that have hooks already, by the id of the module; these get no others.
        """
        all_places = list(places(model))
        visible = [place for place in all_places if not place.hidden and has_forward(place.module)]
        chosen = {place for place in visible if self.selection.is_selected(place)}
        at: dict[Place, Layer] = {}
        of: dict[int, list[Layer]] = defaultdict(list)
        modules: dict[int, nn.Module] = {}
        kept = chosen | set(_callers(visible, chosen))
        for place in visible:
            if place not in kept:
                continue
            key = id(place.module)
            parent = next((at[above] for above in _ancestors(place) if above in at), None)
            if key in taken:
                at[place] = taken[key]
            elif key in of and any(layer.parent is parent for layer in of[key]):
                at[place] = of[key][0]  # called from the same place: the same name
            else:
                at[place] = self._layer(place, parent)
                of[key].append(at[place])
                modules[key] = place.module
        for layers in of.values():
            if len(layers) > 1:
                layers[0].aliases = layers
                for layer in layers:
                    layer.primary = layers[0]
                    if layer.standalone is not None:
                        layer.standalone.primary = layers[0]
        hidden = [
            self.selection.name(place)
            for place in all_places
            if place.hidden and has_forward(place.module) and self.selection.is_selected(place)
        ]
        hookless = {
            id(place.module)
            for place in kept
            if any(isinstance(above.module, nn.TransformerEncoderLayer) for above in (place, *_ancestors(place)))
        }  # hooks on the layer or inside it would switch off its fast path and change its results
        self.layers = [layers[0] for layers in of.values()]
        return ModelLayout([(modules[key], layers[0]) for key, layers in of.items()], hookless, hidden)

    def _layer(self, place: Place, parent: Layer | None) -> Layer:
        """Return a new layer for ``place``; it has no regions if the place was not selected."""
        name = self.selection.name(place)
        if self.label and not place.path:
            name += f"[{self.label}]"
        if not self.selection.is_selected(place):
            return Layer(name, None, None, None, parent)
        layer = self._layer_with_regions(name, place, parent)
        if self.selection.names == "class" and _has_namesake(place, parent):
            path = f"{self.label}.{place.path}" if self.label else place.path
            layer.standalone = self._layer_with_regions(f"{name}[{path}]", place, parent)
            layer.standalone.primary = layer
        return layer

    def _layer_with_regions(self, name: str, place: Place, parent: Layer | None) -> Layer:
        kind = class_name(place.module)
        backward = self._region(f"{name} (backward)", kind) if self._backward else None
        forward = self._region(name, kind)
        evaluation = self._region(f"{name} (eval)", kind) if self._modes else forward
        return Layer(name, forward, evaluation, backward, parent)


def _new_region(name: str, kind: str) -> Region:
    return Region(name, region.by_name(kind), DOMAIN)  # by class, so that equal layers have one color


def _has_namesake(place: Place, parent: Layer | None) -> bool:
    """Return whether the holder of ``place`` has another attribute of its class; layers in a list have none.

    Without a ``parent``, the holder was not chosen or has no forward, such as an agent that calls its actor.
    """
    own = place.path.rpartition(".")[2]
    if place.parent is None or own.isdecimal() or (parent is None and has_forward(place.parent.module)):
        return False
    kind, held = class_name(place.module), compiled_from(place.parent.module)._modules
    return any(other is not None and name != own and class_name(other) == kind for name, other in held.items())


def _ancestors(place: Place) -> Iterator[Place]:
    while place.parent is not None:
        place = place.parent
        yield place


def _callers(visible: list[Place], chosen: set[Place]) -> Iterator[Place]:
    """Yield the callers of selected modules with several places, which the calls around them distinguish."""
    times = Counter(id(place.module) for place in chosen)
    for place in visible:
        if place in chosen and times[id(place.module)] > 1:
            yield from islice((above for above in _ancestors(place) if has_forward(above.module)), 1)
