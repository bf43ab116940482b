"""`Installer`: puts hooks on modules when a recording starts or a tool is attached, and takes them off after it."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import compat
from ..compat import COMPILED_CALL
from ..guard import guard
from ..patch import Patch, apply, leave_no_frame, undo
from ..regions import dispatch
from .compiling import wrapped
from .hooks import After, Around, Before, Hook
from .labels import Labels
from .module_calls import Layer, busy
from .plan import Namer, plan
from .selection import class_name
from .service import Service
from .stand_in import StandIn, compiled_call

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def copied(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for ``original``, a class's ``__getstate__``, and leaves out what is on its modules."""

    @functools.wraps(original)
    def getstate(module: nn.Module) -> Any:
        state = original(module)
        try:
            return without_hooks(state)
        except Exception as error:
            try:
                guard.failed("leaving hooks out of a copy", error)
            except Exception as raised:
                if raised is error:
                    raise
        return state

    return getstate


def copier(module: nn.Module) -> type:
    """Return the class whose ``__getstate__`` copies ``module``: torch's own, or that of a recurrent module."""
    return next((kind for kind in type(module).__mro__ if "__getstate__" in vars(kind)), nn.Module)


def without_hooks(state: Any) -> Any:
    """Return the state of a module, as copies and pickles have it, without our hooks."""
    if isinstance(state, dict) and isinstance(state.get(COMPILED_CALL), StandIn):
        state = {name: value for name, value in state.items() if name != COMPILED_CALL}
    if not isinstance(state, dict) or not all(isinstance(state.get(name), dict) for name in HOOKS):
        return state
    ours = {key for name in HOOKS for key, hook in state[name].items() if isinstance(hook, Hook)}
    if ours:
        state = dict(state)  # it may be the module's own dictionary
        for name in (*HOOKS, *FLAGS):
            state[name] = OrderedDict((key, value) for key, value in state[name].items() if key not in ours)
    return state


def takes_hooks(module: nn.Module) -> bool:
    """Tell whether hooks can be put on ``module``, and kept out of its copies, which it makes in the usual way."""
    kind: Any = type(module)
    return (
        not isinstance(module, torch.jit.ScriptModule)
        and not hasattr(kind, "__deepcopy__")
        and kind.__getstate__ is nn.Module.__getstate__
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
    )


class Fitting:
    """What is to be on one module: two hooks, or something that stands for its call.

    Args:
        module: the module.
        layer: the first of its layers.
        shapes: whether to show the shapes of the inputs.
        hooks: whether it may have hooks, as far as others are concerned.
    """

    def __init__(self, module: nn.Module, layer: Layer, shapes: bool, hooks: bool) -> None:
        self.layer = layer
        self._shapes = shapes
        self._hooks = hooks
        self._module = weakref.ref(module)
        self._patch: Patch | None = None
        self._handles: list[Any] = []
        self._before: Before | None = None
        self._after: After | None = None

    def put_on(self) -> None:
        """Put it on the module."""
        module = self._module()
        if module is None:
            return
        compiled = compiled_call(module) is not None
        if compiled or not self._hooks or not takes_hooks(module):
            layer, shapes, held = self.layer, self._shapes, self._module
            self._patch = Patch(module, COMPILED_CALL, lambda call: Around(layer, shapes, call, held))
            self._patch.apply()
            return
        before = self._before = Before(self.layer, self._shapes, self._module)
        self._after = After(self.layer, self._module)
        # Torch's own methods, whatever a class made of them. Ours comes first, so that what other hooks do before
        # the forward, as the all-gather of FSDP, is inside.
        register = nn.Module.register_forward_pre_hook
        self._handles.append(register(module, before, prepend=True, with_kwargs=self._shapes))
        self._handles.append(nn.Module.register_forward_hook(module, self._after, always_call=True))

    @property
    def copier(self) -> type | None:
        """The class whose ``__getstate__`` has to be patched by `copied`, where that is not torch's own."""
        module = self._module()
        return copier(module) if self._patch is not None and module is not None else None

    def begin_no_more(self) -> None:
        """Let no call begin from now on; those that run know of each other by then."""
        if self._before is not None:
            self._before.off = True

    def take_off(self, running: set[Layer]) -> bool:
        """Take it away; False while a call of the layer is ``running``, after which it goes by itself."""
        if self._patch is not None:
            self._patch.undo()
        elif self._after is not None and self.layer in running:
            self._after.then = self._later
            return False
        for handle in self._handles:
            handle.remove()
        return True

    @guard.contained("taking hooks off")
    def _later(self) -> None:
        self.take_off(busy())


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
