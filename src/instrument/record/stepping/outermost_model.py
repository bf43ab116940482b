"""`OutermostModel`: finds the first module with parameters that the program calls, and follows its calls."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...base.compat import compiler
from ...base.compat.compiler import COMPILED_CALL
from ...base.guard import guard
from ...base.imports import ImportHook
from ...base.patch import Change, Patch, apply, leave_no_frame, then, transparent, undo
from ..modules.compiling import ReplacedCall, called_module, compiled_call, compiling, scripting
from ..modules.installer import getstate_class, leave_hooks_out
from ..modules.module_calls import call_when_idle
from ..regions import dispatch
from .compiled_code import without_compiler

FEATURE = "following the calls of the model"


class _ThreadState(threading.local):
    """Number of nested calls of the model on the thread."""

    depth = 0


class _ModelCall(ReplacedCall):
    """Replaces the call of the outermost model, or until that is found, of a module compiled in place."""

    __slots__ = ("_module", "_outermost")

    def __init__(self, module: nn.Module, compiled: Callable[..., Any] | None, outermost: OutermostModel) -> None:
        super().__init__(compiled)
        self._module = weakref.ref(module)
        self._outermost = outermost

    @transparent
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original, and notify the `OutermostModel`."""
        module = called_module(sys._getframe(1), self._module())
        call = self.compiled
        if call is None:
            # Another object may search its model by the class attribute, which the module's attribute hides.
            on_class = vars(nn.Module)[COMPILED_CALL]
            call = module._call_impl if on_class is None else functools.partial(on_class, module)
        if dispatch.tracing() or module is None:  # the module is deleted, its compiled call is not
            return call(*args, **kwargs)
        try:
            return self._outermost.call(module, call, args, kwargs)
        except BaseException as error:
            leave_no_frame(error)
            raise


class OutermostModel:
    """Finds the outermost model and follows its calls, from `follow` to `remove`.

    The model is found by a class attribute that torch reads at each call of a module; it is reset at once, so that
    neither other modules nor compiled code ever see it. From then on a replacement takes the call of that model.
    Hooks are not used: some libraries refuse models with hooks, or run them differently.
    ``model.compile()`` sets the same attribute on the module, which hides the class attribute, so such modules
    have a replacement until the model is found.

    Args:
        on_found: called with the model before its first call.
        on_called: called with the model after each call that did not fail, once its region is closed; after the
            outermost of nested calls.
        ignores_calls: returns whether calls on this thread are ignored in the search.
    """

    def __init__(
        self,
        on_found: Callable[[nn.Module], None],
        on_called: Callable[[nn.Module], None],
        ignores_calls: Callable[[], bool] = lambda: False,
    ) -> None:
        self._on_found = on_found
        self._on_called = on_called
        self._ignores_calls = ignores_calls
        self._thread_state = _ThreadState()
        self._model: weakref.ref[nn.Module] | None = None
        self._removed = False
        self._searching = False  # from `follow` until the model is found
        self._class_patches: list[Patch] = []  # the class attribute
        self._candidates: list[Patch] = []  # on modules compiled in place, during the search
        self._model_patches: list[Patch] = []
        self._other_patches: list[Change] = []  # until `remove`
        self._patched_classes: set[type] = set()  # classes whose copies leave out the replacement

    def follow(self) -> None:
        """Start the search; after an interrupt at any point, `remove` undoes it."""
        if not compiler.has_compiled_call():
            return
        self._searching = True
        self._search()
        on_compile = Patch(nn.Module, "compile", lambda original: then(original, self._on_compiled_in_place))
        apply([on_compile], self._other_patches)
        for module in compiler.compiled_in_place():
            self._on_compiled_in_place(module)
        apply([ImportHook("torch._dynamo", self._compiler_imported)], self._other_patches)
        self._stay_removed()

    @property
    def model(self) -> nn.Module | None:
        """The outermost model; None before its first call, and once it is deleted."""
        return self._model() if self._model is not None else None

    @property
    def running(self) -> bool:
        """Whether this thread is inside a call of the model."""
        return self._thread_state.depth > 0

    def remove(self) -> None:
        """Stop following, and restore everything that was replaced."""
        self._removed = True
        self._searching = False
        undo(self._class_patches)
        undo(self._candidates)
        undo(self._model_patches)
        undo(self._other_patches)
        compiling.set_suspended(self._suspend_for_compiling, False)
        scripting.set_suspended(self._suspend_for_scripting, False)

    def _stay_removed(self) -> None:
        """Undo the patches if a signal handler or another thread has called `remove` meanwhile."""
        if self._removed:
            self.remove()

    def _search(self) -> None:
        apply([Patch(nn.Module, COMPILED_CALL, self._make_call)], self._class_patches)
        self._stay_removed()

    def _make_call(self, another: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return a function that torch calls in place of ``_call_impl``, or of ``another`` such function."""
        outermost = self

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            impl: Callable[..., Any] = module._call_impl
            own = impl if another is None else functools.partial(another, module)
            if dispatch.tracing():
                return own(*args, **kwargs)
            try:
                return outermost.call(module, own, args, kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return call

    @transparent
    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``module`` through ``run`` and, if it is the followed model, call `on_called`."""
        if self._searching:
            self._examine(module)
        state, model = self._thread_state, self._model
        before = state.depth
        try:
            following = model is not None and module is model()
            state.depth = before + following
            output = run(*args, **kwargs)
        except BaseException as error:
            leave_no_frame(error)
            raise
        finally:
            state.depth = before
        if following and not before and self._model_patches and self._model is model:  # not compiled meanwhile
            self._end_call()
        return output

    @guard.contained(FEATURE)
    @without_compiler
    def _end_call(self) -> None:
        call_when_idle(self._notify_called)

    @guard.contained(FEATURE)
    def _notify_called(self) -> None:
        model = self.model
        if model is not None and not self._removed:
            self._on_called(model)

    @guard.contained("finding the outermost model")
    @without_compiler
    def _examine(self, module: nn.Module) -> None:
        if not self._ignores_calls() and any(True for _ in module.parameters()):
            self._searching = False
            undo(self._class_patches)
            undo(self._candidates)
            self._attach(module)
            scripting.set_suspended(self._suspend_for_scripting, True)
            self._stay_removed()
            self._on_found(module)

    def _attach(self, module: nn.Module) -> None:
        if not isinstance(module, torch.jit.ScriptModule):
            self._model = weakref.ref(module)
            self._replace_call(module, self._model_patches)

    def _replace_call(self, module: nn.Module, held: list[Patch]) -> None:
        """Replace the call of ``module``, and leave the replacement out of its copies."""
        if getstate_class(module) not in self._patched_classes:
            self._patched_classes.add(getstate_class(module))
            apply([Patch(getstate_class(module), "__getstate__", leave_hooks_out)], self._other_patches)
        compiled = vars(module).get(COMPILED_CALL)
        # Created here: the patch must not keep the module alive.
        replacement = _ModelCall(module, compiled, self)
        apply([Patch(module, COMPILED_CALL, lambda _: replacement)], held)
        self._stay_removed()

    @guard.contained(FEATURE)
    def _on_compiled_in_place(self, module: nn.Module, *_: Any, **__: Any) -> None:
        if self._searching:
            self._replace_call(module, self._candidates)
        elif self._model_patches and module is self.model:
            undo(self._model_patches)
            self._attach(module)

    @guard.contained(FEATURE)
    def _compiler_imported(self, _: Any) -> None:
        if not self._removed:
            compiling.set_suspended(self._suspend_for_compiling, True)
            self._stay_removed()

    @contextlib.contextmanager
    def _suspend_for_scripting(self) -> Iterator[None]:
        """Remove the replacement while TorchScript reads the attributes of the model."""
        followed = bool(self._model_patches)
        undo(self._model_patches)
        yield
        model = self.model
        if followed and model is not None and not self._removed:
            self._attach(model)

    @contextlib.contextmanager
    def _suspend_for_compiling(self) -> Iterator[None]:
        """Remove the patches during compilation; then follow the model that ``torch.compile`` returned, if any.

        A model compiled in place is called through its replacement, which is not compiled.
        """
        searching, model = bool(self._class_patches), self._compilable_model()
        undo(self._class_patches)
        if model is not None:
            undo(self._model_patches)
        yield
        if searching and self._searching:
            self._search()
        if model is not None and not self._removed:
            compiled = compiler.called_compiled(model)
            self._attach(model if compiled is None else compiled)

    def _compilable_model(self) -> nn.Module | None:
        """Return the model if it is followed and may be compiled."""
        kind, model = compiler.compiled_module(), self.model
        if not self._model_patches or model is None or compiled_call(model) is not None:
            return None
        return None if kind and isinstance(model, kind) else model
