"""The calls of the outermost model: the first module with parameters that the program calls."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .. import compat
from ..guard import guard
from ..modules.compiling import compiling
from ..modules.fitting import copied, copier
from ..modules.hooks import Hook
from ..modules.stack import when_closed
from ..patch import Patch, leave_no_frame, undo
from ..regions import live


class _Called(Hook):
    """The forward hook on the outermost model; it pickles as a function that does nothing."""

    __slots__ = ("_called",)

    def __init__(self, called: Callable[[nn.Module], None]) -> None:
        self._called = called

    def __call__(self, module: nn.Module, *_: object) -> None:
        if not live.tracing():
            when_closed(functools.partial(self._ended, module))

    @guard.contained("following the calls of the model")
    def _ended(self, module: nn.Module) -> None:
        self._called(module)


class OutermostModel:
    """Finds the outermost model and follows its calls, until `remove`.

    The model is found by a class attribute that torch reads at each call of a module; it is reset at once, so that
    neither other modules nor compiled code ever see it. From then on one forward hook is on that model.

    Args:
        found: called with the model before its first call.
        called: called with the model after each call that did not fail, once its region is closed.
    """

    def __init__(self, found: Callable[[nn.Module], None], called: Callable[[nn.Module], None]) -> None:
        self._found = found
        self._called = _Called(called)
        self._model: weakref.ref[nn.Module] | None = None
        self._handle: Any = None
        self._removed = False
        self._patches: list[Patch] = []
        self._copies: list[Patch] = []
        name = compat.compiled_call()
        if name is not None:
            self._patches.append(Patch(nn.Module, name, lambda _: self._first_call()))
            compat.when_imported("torch._dynamo", self._compiler_imported)

    @property
    def model(self) -> nn.Module | None:
        """The outermost model; None before its first call, and once it is gone."""
        return self._model() if self._model is not None else None

    def remove(self) -> None:
        """Remove the hook and everything else."""
        self._removed = True
        self._stop_looking()
        undo(self._copies)
        compiling.tell(self._compile, False)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _stop_looking(self) -> None:
        undo(self._patches)

    def _first_call(self) -> Callable[..., Any]:
        """Return what torch calls in place of a module's ``_call_impl``."""
        outermost = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not live.tracing():
                with guard.contained("finding the outermost model"):
                    outermost._look_at(module)
            try:
                return module._call_impl(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return call

    def _look_at(self, module: nn.Module) -> None:
        if self._model is None and next(module.parameters(), None) is not None:
            self._stop_looking()
            self._attach(module)
            self._found(module)

    def _attach(self, module: nn.Module) -> None:
        if not isinstance(module, torch.jit.ScriptModule):
            self._model = weakref.ref(module)
            self._copies = self._copies or [Patch(copier(module), "__getstate__", copied)]
            self._handle = module.register_forward_hook(self._called)

    @guard.contained("following the calls of the model")
    def _compiler_imported(self, _: Any) -> None:
        if not self._removed:
            compiling.tell(self._compile, True)

    @contextlib.contextmanager
    def _compile(self) -> Iterator[None]:
        """Leave what is compiled alone: follow the module that ``torch.compile`` returned, if there is one."""
        self._follow_compiled()
        yield

    @guard.contained("following the calls of the model")
    def _follow_compiled(self) -> None:
        self._stop_looking()
        kind, model = compat.compiled_module(), self.model
        if self._handle is not None and model is not None and not (kind and isinstance(model, kind)):
            self._handle.remove()
            self._handle = None
            compiled = compat.compiled_from(model)
            if compiled is not None:
                self._attach(compiled)
