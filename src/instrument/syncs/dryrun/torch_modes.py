"""The modes that watch a thread: below autograd each operator, and above it each function of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ...base.compat import operators
from ...explain.waits.events import CHOSEN
from ..counting.places import OUTSIDE, UNKNOWN
from .collectives import note_collective
from .graphs import on_cpu
from .rules import OperatorRule, rule_of
from .state import PINNED, RunState, as_cuda, tensors

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, FakeTensor}
_RULES: dict[Any, OperatorRule] = {}
_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_ON_GPU_HINT = (
    ". Tensors made before the dry run, such as those of a batch, an optimizer or a copy of the model, are on the "
    "CPU unless on_gpu names them: on_gpu=[model, batch, optimizer]"
)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Sees each operator that one thread runs, forward and backward."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile trace while the mode is on; it does not see what is traced."""
        return True

    def __init__(self, state: RunState) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._state = state
        self._thread = state.thread
        self._first_device = state.tags.first_device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator."""
        if types and not _PLAIN_TYPES.issuperset(types):
            return NotImplemented  # a tensor subclass goes first, and its own operators come back here
        if func is _DEVICE and type(args[0]) is FakeTensor:  # C++ asks twice an operator
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        with torch._C.DisableTorchFunction():  # in the backward pass, it would see each look at a shape
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs)
        rule = _RULES.get(func)
        if rule is None:
            rule = _RULES[func] = rule_of(func)
        state, thread = self._state, self._thread
        if rule.creates:
            device = self._device_of_created()
        else:
            device = self._first_device(args)
            if device is None and kwargs:
                device = self._first_device(kwargs.values())
            thread.last_device = device
        if device is not None:
            if rule.check is not None:
                thread.in_check = True
                try:
                    rule.check(state, func, args, kwargs)
                finally:
                    thread.in_check = False
            elif rule.same_device and not thread.quiet_depth and has_cpu_tensor(state, args):
                record_mixed_devices(state, rule.name)
        thread.depth += 1
        try:
            fake = state.fake
            if fake is None:
                out, found = run_or_widen(func, args, kwargs), None
            else:
                out, found = fake.run(func, args, kwargs)
        finally:
            thread.depth -= 1
        if fake is not None and isinstance(out, torch.Tensor) and out.layout is not torch.strided:
            state.record_not_covered(
                "tensors without data are never sparse inside: synchronizations on them were not checked"
            )
        if device is not None:
            if not rule.writes:
                outputs = out if rule.gpu_outputs is None else [out[index] for index in rule.gpu_outputs]
                state.tags.put(outputs, device)
            if not rule.checked:
                state.record_not_covered(f"the inside the operator {func._schema.name} was not checked")
            if state.calls is not None and not thread.uncounted_depth:
                state.allocations.on_operator(func, args, kwargs, out, thread.call)
                if rule.counted:
                    mixed = rule.check is not None
                    if rule.on_gpu is not None:
                        translated = rule.on_gpu(args)
                        if translated is not None:
                            (func, args), found = translated, None
                    state.calls.add(thread.places, func, args, kwargs, out, mixed=mixed, found=found)
        if rule.communicates:
            out = note_collective(state, func, args, out)
        return out

    def _run_higher_order(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a composite operator, such as flex_attention, whose parts do not come back here."""
        device = self._first_device(args)
        out = func(*tree_map_only(GraphModule, on_cpu, tuple(args)), **kwargs)
        if device is not None:
            self._state.tags.put(out, device)
            self._state.record_not_covered(f"the inside the operator {func.name()} was not checked")
        return out

    def _device_of_created(self) -> torch.device | None:
        """Return the device on which C++ code creates a tensor: that of the arguments of the public call."""
        inputs = self._thread.inputs
        if self._thread.created_on is not None:
            return self._thread.created_on
        if inputs is not None:
            device: torch.device | None = self._first_device(inputs)
            return device
        # A formula of the backward pass creates it for the gradient of the previous operator.
        return self._thread.last_device if torch._C._current_autograd_node() is not None else None


def record_mixed_devices(state: RunState, name: str) -> None:
    """Record an operator that would raise on a GPU; only once if an early device choice may be the cause."""
    why = f"{name} takes tensors on the CPU and on the GPU, which raises an error on a GPU"
    if state.code_ran_before:
        why += _ON_GPU_HINT
    if state.cpu_by_name is not None:
        if state.early_choice_reported:
            return
        state.early_choice_reported = True
        why = (
            f"{CHOSEN}, without a GPU, so {state.cpu_by_name} uses the CPU. Choose the device inside the "
            "step, or run the file: instrument syncs FILE.py::FUNCTION"
        )
    state.record_not_covered(why, fails=True)


def has_cpu_tensor(state: RunState, values: Sequence[Any]) -> bool:
    """Return whether a tensor with a dimension is not on a GPU."""
    is_on_host = state.tags.is_on_host
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dim() and value.numel() and is_on_host(value):
                return True
        elif isinstance(value, (list, tuple)) and has_cpu_tensor(state, value):
            return True
    return False


def register_higher_order_operators(stack: ExitStack) -> None:
    """Let the mode see composite operators until ``stack`` is closed: torch 2.6 needs a rule for each."""
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    for operator in torch._ops._higher_order_ops.values():

        def run(mode: DispatchMode, /, *args: Any, operator: Any = operator, **kwargs: Any) -> Any:
            return mode._run_higher_order(operator, args, kwargs)

        stack.callback(operator.python_key_table.pop, DispatchMode, None)
        operator.python_key_table[DispatchMode] = run


_aten: Any = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_SLOW_IN_HALF = frozenset((
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default,
    _aten.convolution_backward.default,
))  # fmt: skip


def run_or_widen(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator; run it in double precision if only CUDA supports the type.

    Matmuls and convolutions of 16 bits run in 32: most CPUs are up to 60 times slower in 16.
    """
    if func in _SLOW_IN_HALF and args[0].dtype in _HALVES:
        dtype = args[0].dtype
        wide = [value.float() if isinstance(value, torch.Tensor) else value for value in args]
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype), func(*wide, **kwargs))
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "not implemented for '" not in str(error) or func._schema.is_mutable:
            raise
    kinds = {tensor.dtype for tensor in tensors([*args, kwargs])}
    wide = tree_map_only(torch.Tensor, torch.Tensor.double, (tuple(args), kwargs))
    out = func(*wide[0], **wide[1])
    return (
        tree_map_only(torch.Tensor, lambda tensor: tensor.to(next(iter(kinds))), out) if len(kinds) == 1 else out
    )


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
            thread.places.in_call = UNKNOWN
        thread.inputs = args
        thread.depth += 1
        try:
            return self._calls.get(func, FunctionMode.run_and_tag)(self, func, args, kwargs or {})
        finally:
            thread.depth -= 1
            thread.call, thread.inputs = outer, inputs
            if not outer:
                thread.places.in_call = OUTSIDE

    @contextmanager
    def watch_user_code(self) -> Iterator[None]:
        """Watch user code inside a call, such as hooks and recomputed layers, where the mode is off."""
        thread = self.thread
        before = thread.call, thread.synchronized, thread.inputs, thread.depth
        thread.call, thread.inputs, thread.depth, thread.places.in_call = "", None, 0, OUTSIDE
        try:
            if any(mode is self for mode in operators.function_modes()):
                yield
            else:
                with self:
                    yield
        finally:
            thread.call, thread.synchronized, thread.inputs, thread.depth = before
            thread.places.in_call = UNKNOWN if thread.call else OUTSIDE

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
        before, self.thread.created_on = self.thread.created_on, target
        try:
            out = run(*args, **kwargs)
        finally:
            self.thread.created_on = before
        if device is not None or pinned:
            self.tags.put(out, target or (PINNED if pinned else None))
        return out

    def real_device(self, device: Any) -> torch.device:
        """Return where a tensor really is that the program puts on ``device``: the CPU instead of a GPU."""
        if as_cuda(device) is not None:
            return CPU
        real: torch.device = torch.device(device)
        return real if self.state.fake is None else self.state.fake.existing_device(real)

    def run_on_host(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``func``, whose operators are not those of a GPU."""
        with self.state.uncounted():
            return func(*args, **kwargs)

    def run_quietly(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``func``; its reads on the CPU do not count as synchronizations."""
        self.thread.quiet_depth += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.thread.quiet_depth -= 1
