"""The mode above autograd: answers for devices, carries out moves, and names the outermost public call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from ..compat import operators
from .state import RunState, as_cuda
from .tags import PINNED

CPU = torch.device("cpu")
_METHODS = dict(vars(torch.Tensor))  # including those that torch itself implements in Python
Handler = Callable[["FunctionMode", Any, Sequence[Any], dict[str, Any]], Any]


@lru_cache(maxsize=1024)
def _original(func: Any) -> Any:
    """Return torch's method that ``func`` replaces, or ``func`` if it replaces none."""
    name = next((name for name, held in vars(torch.Tensor).items() if held is func), None)
    return func if name is None or name in _METHODS else getattr(torch._C.TensorBase, name, func)


def default_device() -> torch.device | None:
    """Return the default device that the program set for this thread; None if it set none."""
    contexts = (mode for mode in operators.function_modes() if isinstance(mode, _device.DeviceContext))
    return next((context.device for context in contexts), None)


class FunctionMode(TorchFunctionMode):
    """Intercepts each torch function that one thread calls from Python.

    Args:
        state: the dry run.
        answers: by function, the replacement that answers for tensors.
        calls: by function, the handler of a call that behaves differently on a GPU.
    """

    def __init__(self, state: RunState, answers: Mapping[Any, Handler], calls: Mapping[Any, Handler]) -> None:
        super().__init__()
        self._answers = answers
        self._calls = calls
        self.state = state
        self.thread = state.thread
        self.thread.functions = self
        self.tags = state.tags
        self._constructors = _device._device_constructors()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function."""
        if type(func) is FunctionType:
            func = _original(func)
        answer = self._answers.get(func)
        if answer is not None and not self.thread.foreign_depth:
            return answer(self, func, args, kwargs or {})
        thread = self.thread
        outer, inputs = thread.call, thread.inputs
        if not outer:
            thread.call, thread.synchronized = getattr(func, "__name__", "?"), False
        thread.inputs = args
        thread.depth += 1
        try:
            return self._calls.get(func, FunctionMode.run_and_tag)(self, func, args, kwargs or {})
        finally:
            thread.depth -= 1
            thread.call, thread.inputs = outer, inputs

    @contextmanager
    def watch_user_code(self) -> Iterator[None]:
        """Watch user code inside a call, such as hooks and recomputed layers, where the mode is off."""
        thread = self.thread
        before = thread.call, thread.synchronized, thread.inputs, thread.depth
        thread.call, thread.inputs, thread.depth = "", None, 0
        try:
            if any(mode is self for mode in operators.function_modes()):
                yield
            else:
                with self:
                    yield
        finally:
            thread.call, thread.synchronized, thread.inputs, thread.depth = before

    def run_and_tag(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, and tag its results with the requested device."""
        fake = self.state.fake
        run = func if fake is None else partial(fake.run_or_use_data, func)
        device = kwargs.get("device") if kwargs else None
        named = device is not None
        if device is None and func in self._constructors:
            device = default_device()
        if device is None and not (kwargs and kwargs.get("pin_memory")):
            return run(*args, **kwargs)
        kwargs = dict(kwargs)
        target = as_cuda(device)
        pinned = kwargs.pop("pin_memory", False)
        if device is not None:
            if target is None and named:
                self.state.note_cpu_selection()
            kwargs["device"] = self.real_device(device)
            self.thread.inputs = ()
        out = run(*args, **kwargs)
        if device is not None or pinned:
            self.tags.put(out, target or (PINNED if pinned else None))
        return out

    def real_device(self, device: Any) -> torch.device:
        """Return where a tensor really is that the program puts on ``device``: the CPU instead of a GPU."""
        if as_cuda(device) is not None:
            return CPU
        real: torch.device = torch.device(device)
        return real if self.state.fake is None else self.state.fake.existing_device(real)

    def read(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``func``, which reads a whole tensor; a tensor without data is replaced by one with data."""
        fake = self.state.fake
        return (
            self.run_quietly(func, *args, **kwargs) if fake is None else fake.run_with_data(func, *args, **kwargs)
        )

    def run_quietly(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``func``; its reads on the CPU do not count as synchronizations."""
        self.thread.quiet_depth += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.thread.quiet_depth -= 1
