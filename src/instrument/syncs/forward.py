"""The calls of the outermost model: the first module with parameters that the program calls."""

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

from .. import compat
from ..compat import COMPILED_CALL
from ..guard import guard
from ..modules.compiling import compiling, scripting
from ..modules.fitting import copied, copier
from ..modules.stack import when_closed
from ..modules.stand_in import StandIn, called_module, compiled_call
from ..patch import Patch, apply, leave_no_frame, transparent, undo
from ..regions import live
from .uncompiled import keep

FEATURE = "following the calls of the model"


class _Here(threading.local):
    """On this thread: how many calls of the model run, one inside the other."""

    depth = 0


class _Followed(StandIn):
    """Stands for the call of the outermost model, or of one compiled in place that may be it."""

    __slots__ = ("_outermost",)

    def __init__(self, compiled: Callable[..., Any] | None, outermost: OutermostModel) -> None:
        super().__init__(compiled)
        self._outermost = outermost

    @transparent
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what it stands for."""
        module = called_module(sys._getframe(1), self._outermost.model)
        call = self.compiled
        if call is None:
            # Another one may look for a model: what is on a module hides what is on its class.
            looking = vars(nn.Module)[COMPILED_CALL]
            call = module._call_impl if looking is None else functools.partial(looking, module)
        if live.tracing():
            return call(*args, **kwargs)
        try:
            return self._outermost.call(module, call, args, kwargs)
        except BaseException as error:
            leave_no_frame(error)
            raise


class OutermostModel:
    """Finds the outermost model and follows its calls, from `follow` to `remove`.

    The model is found by a class attribute that torch reads at each call of a module; it is reset at once, so that
    neither other modules nor compiled code ever see it. From then on something stands for the call of that model:
    no hook, as some refuse models with hooks, or run them in another way. What ``model.compile()`` makes hides the
    class attribute, so that something stands for that until the model is found.

    Args:
        found: called with the model before its first call.
        called: called with the model after each call that did not fail, once its region is closed; of calls inside
            each other, after the outermost.
        passes_over: tells whether the calls that this thread makes now find no model.
    """

    def __init__(
        self,
        found: Callable[[nn.Module], None],
        called: Callable[[nn.Module], None],
        passes_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._found = found
        self._called = called
        self._passes_over = passes_over
        self._here = _Here()
        self._model: weakref.ref[nn.Module] | None = None
        self._removed = False
        self._looking: list[Patch] = []
        self._following: list[Patch] = []
        self._always: list[Patch] = []  # until the end
        self._copiers: set[type] = set()  # classes whose copies leave out what stands for a call

    def follow(self) -> None:
        """Begin; whoever holds this can `remove` it, wherever an interrupt comes."""
        if compat.has_compiled_call():
            apply([Patch(nn.Module, COMPILED_CALL, self._first_call)], self._looking)
            apply([Patch(nn.Module, "compile", self._in_place)], self._always)
            compat.when_imported("torch._dynamo", self._compiler_imported)

    @property
    def model(self) -> nn.Module | None:
        """The outermost model; None before its first call, and once it is gone."""
        return self._model() if self._model is not None else None

    @property
    def running(self) -> bool:
        """Whether this thread is inside a call of the model."""
        return self._here.depth > 0

    def remove(self) -> None:
        """End, and put back all that was replaced."""
        self._removed = True
        undo(self._looking)
        undo(self._following)
        undo(self._always)
        compiling.set_suspended(self._compile, False)
        scripting.set_suspended(self._scripted, False)

    def _first_call(self, another: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return what torch calls in place of a module's ``_call_impl``, or of ``another`` of these."""
        outermost = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = module._call_impl if another is None else functools.partial(another, module)
            if live.tracing():
                return own(*args, **kwargs)
            try:
                return outermost.call(module, own, args, kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return call

    @transparent
    def call(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``module`` through ``call`` and, if it is the followed model, notify `called`."""
        if self._looking:
            self._look_at(module)
        here, model = self._here, self._model
        before = here.depth
        try:
            following = model is not None and module is model()
            here.depth = before + following
            output = call(*args, **kwargs)
        except BaseException as error:
            leave_no_frame(error)
            raise
        finally:
            here.depth = before
        if following and not before and self._following and self._model is model:  # not compiled meanwhile
            self._call_ended()
        return output

    @guard.contained(FEATURE)
    def _call_ended(self) -> None:
        when_closed(self._ended)

    @guard.contained(FEATURE)
    def _ended(self) -> None:
        model = self.model
        if model is not None and not self._removed:
            self._called(model)

    @guard.contained("finding the outermost model")
    def _look_at(self, module: nn.Module) -> None:
        if self._model is None and not self._passes_over() and next(module.parameters(), None) is not None:
            undo(self._looking)
            self._attach(module)
            scripting.set_suspended(self._scripted, True)
            self._found(module)

    def _attach(self, module: nn.Module) -> None:
        if not isinstance(module, torch.jit.ScriptModule):
            self._model = weakref.ref(module)
            self._put_on(module, self._following)

    def _put_on(self, module: nn.Module, held: list[Patch]) -> None:
        """Stand for the call of ``module``, also in copies of it."""
        if copier(module) not in self._copiers:
            self._copiers.add(copier(module))
            apply([Patch(copier(module), "__getstate__", copied)], self._always)
        compiled = vars(module).get(COMPILED_CALL)
        apply([Patch(module, COMPILED_CALL, lambda _: _Followed(compiled, self))], held)

    def _in_place(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def compile(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            try:
                original(module, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            self._compiled_in_place(module)

        return compile

    @guard.contained(FEATURE)
    def _compiled_in_place(self, module: nn.Module) -> None:
        if self._looking:
            self._put_on(module, self._looking)
        elif self._following and module is self.model:
            undo(self._following)
            self._attach(module)

    @guard.contained(FEATURE)
    def _compiler_imported(self, _: Any) -> None:
        if not self._removed:
            keep(sys.modules[__name__], sys.modules[Patch.__module__])
            compiling.set_suspended(self._compile, True)

    @contextlib.contextmanager
    def _scripted(self) -> Iterator[None]:
        """Leave nothing on the model while TorchScript goes through its attributes."""
        followed = bool(self._following)
        undo(self._following)
        yield
        model = self.model
        if followed and model is not None and not self._removed:
            self._attach(model)

    @contextlib.contextmanager
    def _compile(self) -> Iterator[None]:
        """Leave what is compiled alone: follow the module that ``torch.compile`` returned, if there is one.

        One that is compiled in place is called through what stands for its call, which is not compiled.
        """
        self._follow_compiled()
        yield

    @guard.contained(FEATURE)
    def _follow_compiled(self) -> None:
        undo(self._looking)
        kind, model = compat.compiled_module(), self.model
        if not self._following or model is None or compiled_call(model) is not None:
            return
        if not (kind and isinstance(model, kind)):
            undo(self._following)
            compiled = compat.compiled_from(model)
            if compiled is not None:
                self._attach(compiled)
