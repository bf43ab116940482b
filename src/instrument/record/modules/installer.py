"""`annotate_modules`: puts hooks on modules while a profiler records, and removes them completely."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...base.compat import compiler
from ...base.compat.compiler import COMPILED_CALL
from ...base.guard import guard
from ...base.patch import Patch, apply, then, undo
from ..regions import dispatch
from .compiling import ReplacedCall, called_through_compiled, compiled_call
from .hooks import FLAGS, HOOKS, CallWrapper, ForwardHook, ForwardPreHook, Hook
from .labels import Labels
from .module_calls import Layer, running_layers
from .selection import AnnotatedModel, Rules, Selection, class_name
from .service import Handle, PatchService, contain_request


def leave_hooks_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``original``, the ``__getstate__`` of a class of modules, to leave our hooks out of the state."""

    @functools.wraps(original)
    def getstate(module: nn.Module) -> Any:
        state = original(module)
        with guard.contained("leaving hooks out of a copy"):
            return without_hooks(state)
        return state

    return getstate


def getstate_class(module: nn.Module) -> type:
    """Return the class whose ``__getstate__`` copies ``module``: `nn.Module`, or a class such as `nn.RNN`."""
    return next((kind for kind in type(module).__mro__ if "__getstate__" in vars(kind)), nn.Module)


def without_hooks(state: Any) -> Any:
    """Return the ``state`` that copies and pickles of a module have, without our hooks."""
    if isinstance(state, dict) and isinstance(state.get(COMPILED_CALL), ReplacedCall):
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
    """Return whether ``module`` can have hooks, and makes copies in torch's way, which leaves the hooks out."""
    kind: Any = type(module)
    return (
        not isinstance(module, torch.jit.ScriptModule)
        and not hasattr(kind, "__deepcopy__")
        and kind.__getstate__ is nn.Module.__getstate__
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
    )


class ModuleHooks:
    """The two hooks of one module, or the wrapper of its call.

    Args:
        module: the module.
        layer: its primary layer.
        shapes: whether to show the shapes of the inputs.
        hooks: whether hooks may be used; else the call is wrapped.
    """

    def __init__(self, module: nn.Module, layer: Layer, shapes: bool, hooks: bool) -> None:
        self.layer = layer
        self._shapes = shapes
        self._hooks = hooks
        self._module = weakref.ref(module)
        self._patch: Patch | None = None
        self._handles: list[Any] = []
        self._before: ForwardPreHook | None = None
        self._after: ForwardHook | None = None

    def attach(self) -> None:
        """Put the hooks on the module, or wrap its call."""
        module = self._module()
        if module is None:
            return
        compiled = compiled_call(module) is not None
        if compiled or not self._hooks or not takes_hooks(module):
            layer, shapes, held = self.layer, self._shapes, self._module
            self._patch = Patch(module, COMPILED_CALL, lambda call: CallWrapper(layer, shapes, call, held))
            self._patch.apply()
            return
        before = self._before = ForwardPreHook(self.layer, self._shapes, self._module)
        self._after = ForwardHook(self.layer, self._module)
        # torch's own methods, as a class may override them. Our pre-hook comes first, so that the region contains
        # what other hooks do before the forward, such as the all-gather of FSDP.
        register = nn.Module.register_forward_pre_hook
        self._handles.append(register(module, before, prepend=True, with_kwargs=self._shapes))
        self._handles.append(nn.Module.register_forward_hook(module, self._after, always_call=True))

    @property
    def getstate_class(self) -> type | None:
        """The class whose ``__getstate__`` has to be patched by `leave_hooks_out`; None for modules with hooks."""
        module = self._module()
        return getstate_class(module) if self._patch is not None and module is not None else None

    def disable(self) -> None:
        """Ignore calls that begin from now on."""
        if self._before is not None:
            self._before.disabled = True

    def detach(self, running: set[Layer]) -> bool:
        """Remove the hooks; return False while the layer is ``running``: they go at the end of that call."""
        if self._patch is not None:
            self._patch.undo()
        elif self._after is not None and self.layer in running:
            self._after.after_call = self._detach_later
            return False
        for handle in self._handles:
            handle.remove()
        return True

    @guard.contained("removing hooks")
    def _detach_later(self) -> None:
        self.detach(running_layers())


class Installer(PatchService[AnnotatedModel]):
    """Puts hooks on the modules of all annotated models, once on each module, and removes them."""

    during_warm_up = True  # the first recorded step may run the backward of an earlier forward

    def __init__(self) -> None:
        super().__init__()
        self._module_hooks: dict[int, ModuleHooks] = {}  # by the module's id
        self._around_compiled: dict[int, Layer] = {}  # called through a compiled wrapper; by the module's id
        self._patches: list[Patch] = []
        self._patched_classes: set[type] = set()  # classes with a patched ``__getstate__``
        self._labels = Labels()  # of models
        self._still_running: list[ModuleHooks] = []  # to be removed at the end of a call

    def apply(self, on: bool) -> None:
        """Remove the old hooks; if ``on``, put hooks on the models as they are now."""
        self._detach()
        undo(self._patches)
        self._patched_classes.clear()
        if on:
            self._attach()
            self._patch_torch()

    def layer_around(self, module: nn.Module) -> Layer | None:
        """Return the layer whose region goes around a call of ``module`` through its compiled wrapper."""
        if id(module) in self._module_hooks:
            called_through_compiled[id(module)] = module  # its hooks would run in compiled code, or never
            self.refresh()
        return self._around_compiled.get(id(module))

    def _attach(self) -> None:
        taken: dict[int, Layer] = {}
        with guard.contained("labelling models"):
            self._label_models()
        for annotated in list(self.requests):
            model = annotated.model()
            if model is None:
                self.requests.remove(annotated)
                continue
            with guard.contained("annotating modules"):
                self._hook_model(annotated, model, taken)
        dispatch.log_hidden()

    def _label_models(self) -> None:
        """Label models with the same name."""
        models_by_request = [(annotated, annotated.model()) for annotated in self.requests]
        named: dict[str, dict[int, nn.Module]] = defaultdict(dict)
        for _, model in models_by_request:
            if model is not None:
                named[class_name(model)][id(model)] = model
        for models in named.values():
            self._labels.label_all(list(models.values()))
        for annotated, model in models_by_request:
            if not annotated.was_called:  # else it keeps its name for the rest of this recording
                annotated.label = self._labels.of(model)

    def _hook_model(self, annotated: AnnotatedModel, model: nn.Module, taken: dict[int, Layer]) -> None:
        layout = annotated.lay_out(model, taken)
        dispatch.compiled_away.update(layout.hidden)
        for module, layer in layout.layers:
            if called_through_compiled.get(id(module)) is module:
                self._around_compiled[id(module)] = layer
            else:
                hooks = id(module) not in layout.hookless
                attached = self._module_hooks[id(module)] = ModuleHooks(module, layer, annotated.shapes, hooks)
                with guard.contained(f"annotating {layer.name}"):
                    attached.attach()
                    self._follow_copies(attached.getstate_class)
            taken[id(module)] = layer

    def _follow_copies(self, kind: type | None) -> None:
        if kind is not None and kind is not nn.Module and kind not in self._patched_classes:
            self._patched_classes.add(kind)
            apply([Patch(kind, "__getstate__", leave_hooks_out)], self._patches)

    def _detach(self) -> None:
        for hooks in self._module_hooks.values():
            hooks.disable()
        running = running_layers() if self._module_hooks or self._still_running else set()
        self._still_running = [hooks for hooks in self._still_running if not self._try_detach(hooks, running)]
        for key, hooks in list(self._module_hooks.items()):  # removed one by one, in case of an interrupt
            if not self._try_detach(hooks, running):
                self._still_running.append(hooks)
            del self._module_hooks[key]
        self._around_compiled.clear()
        for annotated in self.requests:
            annotated.was_called = annotated.was_called or any(layer.was_called for layer in annotated.layers)
            if not self._is_on and annotated.layers:
                if not annotated.was_called and compiler.graphs_compiled():
                    dispatch.compiled_away.update(
                        layer.name for layer in annotated.layers if layer.region is not None
                    )
                annotated.was_called = False
            annotated.layers = []

    @staticmethod
    @guard.contained("removing hooks")  # tried again with the next change
    def _try_detach(hooks: ModuleHooks, running: set[Layer]) -> bool:
        return hooks.detach(running)

    def _patch_torch(self) -> None:
        """Patch what compiles, copies and pickles modules."""
        watched = [
            Patch(nn.Module, "compile", lambda original: then(original, lambda *_, **__: self.observe())),
            Patch(nn.Module, "__getstate__", leave_hooks_out),
        ]
        compiled = compiler.compiled_module()
        if compiled is not None:
            watched.append(Patch(compiled, "__call__", self._call_compiled))
        apply(watched, self._patches)

    def _call_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(compiled: Any, /, *args: Any, **kwargs: Any) -> Any:
            layer = None
            with guard.contained("annotating a compiled module"):
                layer = self.layer_around(compiled._orig_mod)
            if layer is None:
                return original(compiled, *args, **kwargs)
            return CallWrapper(layer, False, original, weakref.ref(compiled._orig_mod))(compiled, *args, **kwargs)

        return call


installer = Installer()


@contain_request
def annotate_modules(
    model: nn.Module,
    depth: int | None = None,
    include: Rules | None = None,
    exclude: Rules | None = None,
    backward: bool = True,
    *,
    names: str = "path",
    skip_containers: bool = False,
    shapes: bool = False,
    modes: bool = True,
) -> Handle:
    """Annotate each module of ``model``, forward and backward, in every active profiler.

    A region has the module's qualified name (``encoder.layers.3.self_attn``); the region of its backward has the
    same name with ``(backward)``. The model itself is named after its class and, if several models have the same
    class, by the variable that holds it: ``Sequential[actor]``. The modules have hooks only while a profiler
    records or a tool is attached; the model is inspected again each time. Arguments, outputs and gradients do not
    change.

    A compiled or scripted module is one region without regions inside.

    Args:
        model: any module, wrapped (DDP, FSDP, torch.compile) or not. The library does not keep it alive.
        depth: how many levels below the model; 0 is only the model, None is all. Modules without a forward,
            such as `torch.nn.ModuleList`, and wrappers that hold only the model, such as DDP, do not count.
        include: which modules: a pattern of qualified names as in a shell (``"encoder.layers.*"``, where
            ``*`` also matches dots), a compiled regular expression (matched by ``search``), a class, a
            function of name and module, or a sequence of these, one of which must match.
        exclude: which modules to leave out; the modules inside them stay.
        backward: whether to annotate backward as well: from the first gradient of the module's outputs until the
            gradients of its inputs, or of its parameters if no input needs one, are computed.
        names: "path", "class" (``LlamaAttention``) or "both" (``layers.3.self_attn: LlamaAttention``).
        skip_containers: whether to leave out `torch.nn.Sequential`, `ModuleList` and `ModuleDict`; modules inside
            keep their names.
        shapes: whether to show the shapes of the inputs: in NVTX the first one as the payload; in torch.profiler
            all of them, as inputs, if it records shapes.
        modes: whether to add ``(eval)`` to the name of a forward in evaluation mode.

    Returns:
        A handle with ``remove()``; it is a context manager as well. A module that another handle annotates is left
        to that handle until it is removed.

    Raises:
        TypeError: ``model`` is not a module, or a rule is of another kind.
        ValueError: a rule matches no module, or another argument is not accepted.

    Example:
        >>> annotate_modules(model, include="layers.*", exclude=torch.nn.Dropout)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f'"model" must be a torch.nn.Module: {model!r:.200}')
    selection = Selection(depth, include, exclude, skip_containers, names)
    selection.check(model)
    return installer.add(AnnotatedModel(model, selection, backward, modes, shapes))
