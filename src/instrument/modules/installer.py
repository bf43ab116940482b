"""Hooks exist while somebody listens: they come when a recording starts or a tool is attached, and go after it."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn

from .. import compat
from ..guard import guard
from ..patch import Patch, apply, leave_no_frame, undo
from ..regions import dispatch
from .compiled import wrapped
from .fitting import Fitting, copied
from .hooks import Around
from .labels import Labels
from .layer import Layer
from .plan import Namer, plan
from .selection import class_name
from .service import Service
from .stack import busy


class Fitter:
    """One model that is to have hooks, and how."""

    def __init__(self, model: nn.Module, namer: Namer, shapes: bool) -> None:
        self.model = weakref.ref(model)
        self.namer = namer
        self.shapes = shapes
        self.layers: list[Layer] = []
        self.seen = False  # some layer was called since the hooks came

    def __str__(self) -> str:
        model = self.model()
        return type(model).__name__ if model is not None else "a model that is gone"


class Installer(Service[Fitter]):
    """Puts hooks on the modules of every model, once on each, and takes them off."""

    early = True  # the backward of the first recorded step may belong to a forward before it

    def __init__(self) -> None:
        super().__init__()
        self._fittings: dict[int, Fitting] = {}  # by the module's id
        self._outside: dict[int, Layer] = {}  # called through what torch.compile returned; by the module's id
        self._patches: list[Patch] = []
        self._copying: set[type] = set()  # classes that copy their modules in their own way
        self._labels = Labels()  # of models
        self._leaving: list[Fitting] = []  # whose module is called; an interrupt may keep them from going

    def apply(self, on: bool) -> None:
        """Put hooks on the models as they are now; take the old ones off."""
        self._take_off()
        undo(self._patches)
        self._copying.clear()
        if on:
            self._put_on()
            self._watch()

    def outside(self, module: nn.Module) -> Layer | None:
        """Return the layer whose region goes around ``module``, which torch.compile wrapped and is called."""
        if id(module) in self._fittings:
            wrapped[id(module)] = module  # so far it had hooks: they would run in compiled code, or never
            self.settle()
        return self._outside.get(id(module))

    def _put_on(self) -> None:
        taken: dict[int, Layer] = {}
        with guard.contained("telling models apart"):
            self._label()
        for fitter in list(self.requests):
            model = fitter.model()
            if model is None:
                self.requests.remove(fitter)
                continue
            with guard.contained("annotating modules"):
                self._fit(fitter, model, taken)
        dispatch.tell_hidden()

    def _label(self) -> None:
        """Label models that go by the same name."""
        known = [(fitter, fitter.model()) for fitter in self.requests]
        named: dict[str, dict[int, nn.Module]] = defaultdict(dict)
        for _, model in known:
            if model is not None:
                named[class_name(model)][id(model)] = model
        for models in named.values():
            self._labels.tell_apart(list(models.values()))
        for fitter, model in known:
            if not fitter.seen:  # else it keeps the name that it has in this recording
                fitter.namer.label = self._labels.of(model)

    def _fit(self, fitter: Fitter, model: nn.Module, taken: dict[int, Layer]) -> None:
        planned = plan(model, fitter.namer, taken)
        dispatch.compiled_away.update(planned.hidden)
        fitter.layers = [layer for _, layer in planned.layers]
        for module, layer in planned.layers:
            if wrapped.get(id(module)) is module:
                self._outside[id(module)] = layer
            else:
                hooks = id(module) not in planned.hookless
                fitting = self._fittings[id(module)] = Fitting(module, layer, fitter.shapes, hooks)
                with guard.contained(f"annotating {layer.name}"):
                    fitting.put_on()
                    self._follow_copies(fitting.copier)
            taken[id(module)] = layer

    def _follow_copies(self, kind: type | None) -> None:
        if kind is not None and kind is not nn.Module and kind not in self._copying:
            self._copying.add(kind)
            apply([Patch(kind, "__getstate__", copied)], self._patches)

    def _take_off(self) -> None:
        for fitting in self._fittings.values():
            fitting.begin_no_more()
        running = busy() if self._fittings or self._leaving else set()
        self._leaving = [fitting for fitting in self._leaving if not self._gone(fitting, running)]
        for key, fitting in list(self._fittings.items()):  # forgotten once they are gone, if interrupted
            if not self._gone(fitting, running):
                self._leaving.append(fitting)
            del self._fittings[key]
        self._outside.clear()
        for fitter in self.requests:
            fitter.seen = fitter.seen or any(layer.seen for layer in fitter.layers)
            if not self._on and fitter.layers:
                if not fitter.seen and compat.graphs_compiled():
                    dispatch.compiled_away.update(
                        layer.name for layer in fitter.layers if layer.region is not None
                    )
                fitter.seen = False
            fitter.layers = []

    @staticmethod
    @guard.contained("taking hooks off")  # tried again with the next change
    def _gone(fitting: Fitting, running: set[Layer]) -> bool:
        return fitting.take_off(running)

    def _watch(self) -> None:
        """Be told of what torch compiles, copies and pickles."""
        watched = [Patch(nn.Module, "compile", self._compile), Patch(nn.Module, "__getstate__", copied)]
        compiled = compat.compiled_module()
        if compiled is not None:
            watched.append(Patch(compiled, "__call__", self._call_compiled))
        apply(watched, self._patches)

    def _compile(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def compile(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            try:
                original(module, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            self.observe()

        return compile

    def _call_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
            layer = None
            with guard.contained("annotating a compiled module"):
                layer = self.outside(compiled._orig_mod)
            if layer is None:
                return original(compiled, *args, **kwargs)
            return Around(layer, False, original, weakref.ref(compiled._orig_mod))(compiled, *args, **kwargs)

        return call


installer = Installer()
