"""`lay_out`: decides which modules of a model get which layers and hooks, given the model as it is now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..regions import region
from ..regions.region import DOMAIN, Region
from .compiling import compiled_from
from .module_calls import Layer
from .selection import Place, Selection, class_name, has_forward, places


class Namer:
    """Makes the layers of one model, and keeps their regions, which profilers prepare once."""

    def __init__(self, selection: Selection, backward: bool, modes: bool) -> None:
        self.selection = selection
        self.label = ""  # distinguishes the model from others with its name
        self._backward = backward
        self._modes = modes
        self._regions: dict[tuple[str, str], Region] = {}

    def layer(self, place: Place, parent: Layer | None) -> Layer:
        """Return a new layer for ``place``; it has no regions if the place was not selected."""
        name = self.selection.name(place)
        if self.label and not place.path:
            name += f"[{self.label}]"
        if not self.selection.is_selected(place):
            return Layer(name, None, None, None, parent)
        layer = self._new_layer(name, place, parent)
        if self.selection.names == "class" and _has_namesake(place, parent):
            path = f"{self.label}.{place.path}" if self.label else place.path
            layer.standalone = self._new_layer(f"{name}[{path}]", place, parent)
            layer.standalone.primary = layer
        return layer

    def _new_layer(self, name: str, place: Place, parent: Layer | None) -> Layer:
        kind = class_name(place.module)
        backward = self._region(f"{name} (backward)", kind) if self._backward else None
        forward = self._region(name, kind)
        evaluation = self._region(f"{name} (eval)", kind) if self._modes else forward
        return Layer(name, forward, evaluation, backward, parent)

    def _region(self, name: str, kind: str) -> Region:
        # By class, so that equal layers have one color.
        known = self._regions.get((name, kind))
        if known is None:
            known = self._regions[name, kind] = Region(name, region.by_name(kind), DOMAIN)
        return known


@dataclass
class ModelLayout:
    """The layers and hooks of one model.

    Attributes:
        layers: each module, with the first of its layers.
        hookless: the ids of modules that behave differently when there are hooks on them.
        hidden: the names inside compiled code.
    """

    layers: list[tuple[nn.Module, Layer]]
    hookless: set[int]
    hidden: list[str]


def lay_out(model: nn.Module, namer: Namer, taken: dict[int, Layer]) -> ModelLayout:
    """Return the plan for ``model``.

    Args:
        model: the model.
        namer: makes the layers.
        taken: the layers of modules that have hooks already, by the id of the module; they get no second hooks.
    """
    known = list(places(model))
    visible = [place for place in known if not place.hidden and has_forward(place.module)]
    chosen = {place for place in visible if namer.selection.is_selected(place)}
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
            at[place] = namer.layer(place, parent)
            of[key].append(at[place])
            modules[key] = place.module
    for layers in of.values():
        if len(layers) > 1:
            layers[0].aliases = layers
            for layer in layers:
                layer.primary = layers[0]
                if layer.standalone is not None:
                    layer.standalone.primary = layers[0]
    inside = [
        place
        for place in known
        if place.hidden and has_forward(place.module) and namer.selection.is_selected(place)
    ]
    hidden = [namer.selection.name(place) for place in inside]
    hookless = {
        id(place.module) for place in kept if any(_has_fast_path(above) for above in (place, *_ancestors(place)))
    }
    return ModelLayout([(modules[key], layers[0]) for key, layers in of.items()], hookless, hidden)


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


def _has_fast_path(place: Place) -> bool:
    """Return whether hooks on the module or inside it would switch off its fast path and change its results."""
    return isinstance(place.module, nn.TransformerEncoderLayer)


def _callers(visible: list[Place], chosen: set[Place]) -> Iterator[Place]:
    """Yield the callers of selected modules with several places, which the calls around them distinguish."""
    several: dict[int, list[Place]] = defaultdict(list)
    for place in visible:
        if place in chosen:
            several[id(place.module)].append(place)
    for found in several.values():
        if len(found) > 1:
            callers = (
                next((above for above in _ancestors(place) if has_forward(above.module)), None) for place in found
            )
            yield from (caller for caller in callers if caller is not None)
