"""The values of kernels: `numerics()` runs each operator of torch on the CPU too, on views of the GPU's memory.

The operator of CUDA runs as without it, so that kernels, copies, allocations and streams are the same; what the
CPU computed is then written where its kernels would have written. The device is idle before and after each
operator, which takes time. Where SIMGPU_NUMERICS=1, whole processes run so.

- Random operators draw from the CPU's generator, seeded by the seed and the offset of the CUDA generator: a seed
  gives the same numbers again, and other ones than a GPU's.
- Operators of a capture are kept, and run again for each replay of the graph, before the next operator.
- Collectives of NCCL move and reduce their data themselves; captured in a graph, they are errors.
- Kernels that no operator launches, such as those that Triton compiles for `torch.compile`, have no values: their
  launch is an error that names them.
- Other threads that Python starts meanwhile compute too; threads of C++ do where torch hands its state on to them,
  as autograd does.
- Sparse tensors, and operators that have neither a kernel for the CPU nor a function in `values_cuda.py`, are
  errors.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

substitutes = importlib.import_module(f"{__name__}_cuda").substitutes

__all__ = ["numerics", "start"]

Work = Callable[[], object]

# What these return holds nothing yet.
WITHOUT_KERNELS = {
    "aten::_pin_memory", "aten::detach_", "aten::empty", "aten::empty_like", "aten::empty_permuted",
    "aten::empty_strided", "aten::is_pinned", "aten::new_empty", "aten::new_empty_strided",
    "aten::pin_memory", "aten::record_stream", "aten::resize_", "aten::resize_as_", "aten::set_",
}  # fmt: skip

# The namespaces of operators whose data NCCL moves.
COLLECTIVES = ("c10d", "_c10d_functional")

# What these return is read from memory that a kernel wrote.
READ_VALUES = {
    "aten::_local_scalar_dense", "aten::allclose", "aten::equal", "aten::is_nonzero", "aten::item",
}  # fmt: skip


@cache
def device_functions() -> ctypes.CDLL:
    functions = ctypes.CDLL(None)
    functions.sim_captured_graph.argtypes = [ctypes.c_void_p]
    return functions


def is_on_gpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def check_layout(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"numerics() of the simulated GPU has no {tensor.layout} tensors")


def view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the CPU with the memory of one of the GPU."""
    check_layout(tensor)
    size, stride = tensor.size(), tensor.stride()
    storage = tensor.untyped_storage()
    bytes_ = storage.nbytes()
    if not bytes_ or not storage.data_ptr():
        return torch.empty_strided(size, stride, dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), bytes_)
    result = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), size, stride)
    if tensor.is_conj():
        torch._C._set_conj(result, True)
    if tensor.is_neg():
        torch._C._set_neg(result, True)
    return result


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the CPU with the values and the strides of another one."""
    source = view(tensor) if tensor.is_cuda else tensor
    return torch.empty_strided(source.size(), source.stride(), dtype=source.dtype).copy_(source)


def written_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator changes."""
    written: list[torch.Tensor] = []
    for place, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            written += [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return written


def seed_of(generator: torch.Generator, salt: int) -> int:
    return (generator.initial_seed() * 0x9E3779B97F4A7C15 + salt * 0xBF58476D1CE4E5B9 + 1) % (1 << 63)


@contextmanager
def drawing_from(seed: int) -> Iterator[torch.Generator]:
    """Seed the CPU's own generator for a block, as some operators take no other."""
    own = torch.default_generator
    state = own.get_state()
    own.manual_seed(seed)
    try:
        yield own
    finally:
        own.set_state(state)


def of_32_bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() < 4:
        return value.float()
    return value


def computed(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator with tensors of the CPU."""
    name = operator._schema.name
    if substitute := substitutes.get(name):
        return substitute(*args, **kwargs)
    composite = operator._can_decompose()
    if not composite and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), "CPU"):
        raise NotImplementedError(f"numerics() of the simulated GPU: {operator} has no kernel for the CPU")
    try:
        return operator(*args, **kwargs)
    except RuntimeError as error:
        if "not implemented for" not in str(error):
            raise
    wide_args, wide_kwargs = tree_map(of_32_bits, (args, kwargs))
    result = operator(*wide_args, **wide_kwargs)
    for narrow, wide in zip(tree_leaves((args, kwargs)), tree_leaves((wide_args, wide_kwargs)), strict=True):
        if wide is not narrow and narrow is not None:
            narrow.copy_(wide)  # of no effect where the operator did not change it
    return result


def scalars_read_by(operator: OpOverload, args: Sequence[Any], result: Any) -> list[int]:
    """Return the numbers that the operator of CUDA reads from its kernels while it runs, such as sizes."""
    name = operator._schema.name
    if name in ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive",
                "aten::unique_dim", "aten::unique_dim_consecutive", "aten::_unique"):  # fmt: skip
        return [len(tree_leaves(result)[0])]
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return [int(torch.count_nonzero(mask)) for mask in masks]
    if name == "aten::repeat_interleave":
        return [len(result)]
    if name == "aten::bincount" and args[0].numel():
        return [int(args[0].min()), int(args[0].max())]
    return []


def kernel_of(operator: HigherOrderOperator) -> Callable[..., Any]:
    """Return the function in Python that an operator of operators is on a GPU."""
    for key in (DispatchKey.CUDA, DispatchKey.CompositeExplicitAutograd):
        if key in operator.py_kernels:
            return operator.py_kernels[key]
    raise NotImplementedError(f"numerics() of the simulated GPU: {operator} has no function for a GPU")


class Numerics(TorchDispatchMode):
    """Computes on the CPU what each operator's kernels would have written."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.graphs: defaultdict[int, list[Work]] = defaultdict(list)
        self.replays = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile` compile, so that Triton's kernels are found."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload | HigherOrderOperator,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator of CUDA, and compute its values."""
        kwargs = kwargs or {}
        faking = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if faking or FakeTensor in types:  # only the sizes are asked for, as by DTensor before each operator
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            with self:
                return kernel_of(func)(*args, **kwargs)
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        leaves, _ = tree_flatten((args, kwargs))
        device = next((leaf.device for leaf in leaves if is_on_gpu(leaf)), None) or next(
            (leaf for leaf in leaves if isinstance(leaf, torch.device) and leaf.type == "cuda"), None
        )
        if device is None or func.is_view or func._schema.name in WITHOUT_KERNELS:
            return func(*args, **kwargs)
        if func._can_decompose() and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
            with self:
                return func.decompose(*args, **kwargs)
        functions = device_functions()
        number = torch.cuda.current_device() if device.index is None else device.index
        with torch._C._DisableFuncTorch():
            graph = functions.sim_captured_graph(torch._C._cuda_getCurrentRawStream(number))
            return self.run(func, args, kwargs, number, graph)

    def run(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], device: int, graph: int
    ) -> Any:
        functions = device_functions()
        self.finish_work()
        if func.namespace in COLLECTIVES:
            if graph:
                raise NotImplementedError(f"numerics() of the simulated GPU has no values of {func} in a graph")
            return func(*args, **kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        generator = kwargs.get("generator") or torch.cuda.default_generators[device]
        salt = 0 if not random or graph else generator.get_offset()
        written = written_arguments(func, args, kwargs)
        kept: dict[int, torch.Tensor] = {}
        replaced_kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}

        def on_cpu(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                if any(leaf is one for one in written):
                    return kept.setdefault(id(leaf), copy_of(leaf))
                return view(leaf) if leaf.is_cuda else leaf
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            return torch.default_generator if isinstance(leaf, torch.Generator) else leaf

        def compute() -> tuple[Any, list[int]]:
            kept.clear()
            cpu_args, cpu_kwargs = tree_map(on_cpu, (args, replaced_kwargs))
            with ExitStack() as stack:
                if random:
                    stack.enter_context(drawing_from(seed_of(generator, salt + self.replays)))
                result = computed(func, cpu_args, cpu_kwargs)
                return result, scalars_read_by(func, cpu_args, result)

        result, scalars = (None, []) if graph else compute()
        functions.sim_operator_begins((ctypes.c_int64 * len(scalars))(*scalars), len(scalars))
        try:
            output = func(*args, **kwargs)
        finally:
            functions.sim_operator_ends()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        read = {id(tensor) for tensor in tensors}
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        leaves, structure = tree_flatten(output)

        def is_view_of_one(tensor: torch.Tensor) -> bool:
            check_layout(tensor)
            return tensor.untyped_storage().data_ptr() in places

        def write(result: Any) -> list[Any]:
            for target in {id(one): one for one in written}.values():
                write_into(func, target, kept[id(target)])
            results = tree_flatten(result)[0]
            values = list(leaves)
            for place, (target, value) in enumerate(zip(leaves, results, strict=True)):
                if not isinstance(target, torch.Tensor):
                    values[place] = value if func._schema.name in READ_VALUES else target
                elif value is not None and id(target) not in read and (written or not is_view_of_one(target)):
                    write_into(func, target, value)
            return values

        if graph:
            self.graphs[graph].append(lambda: write(compute()[0]))
            return output
        functions.sim_drain()
        return tree_unflatten(write(result), structure)

    def finish_work(self) -> None:
        """Wait for the device, and compute what the graphs wrote that it ran since the last operator."""
        functions = device_functions()
        functions.sim_drain()
        ids = (ctypes.c_uint * 64)()
        while count := functions.sim_launched_graphs(ids, len(ids)):
            for number in ids[:count]:
                self.replays += 1
                for work in self.graphs[number]:
                    work()


def write_into(operator: OpOverload, target: torch.Tensor, value: torch.Tensor) -> None:
    if target.size() != value.size() and torch.Tag.dynamic_output_shape in operator.tags:
        target.resize_(value.size())  # its size was read in a way that `scalars_read_by` does not know
    if target.size() != value.size():
        raise NotImplementedError(
            f"numerics() of the simulated GPU: {operator} has other sizes on the CPU: {tuple(value.size())} for "
            f"{tuple(target.size())}"
        )
    (view(target) if target.is_cuda else target).copy_(value)


def in_threads(mode: TorchDispatchMode) -> Callable[[threading.Thread], None]:
    """Return a function like `threading.Thread.start`, whose threads have the mode."""
    start_thread = threading.Thread.start

    def start_in_mode(thread: threading.Thread) -> None:
        vars(thread)["run"] = in_mode(mode, thread.run)
        start_thread(thread)

    return start_in_mode


def in_mode(mode: TorchDispatchMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in a mode."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return run


@contextmanager
def numerics() -> Iterator[None]:
    """Compute the values of kernels in a block, on this thread and those that it starts."""
    functions = device_functions()
    mode = Numerics()
    with ExitStack() as stack:
        functions.sim_drain()
        functions.sim_compute(1)
        stack.callback(functions.sim_compute, 0)
        stack.enter_context(patch.object(threading.Thread, "start", in_threads(mode)))
        # The text of a tensor is made of operators outside all modes.
        printed = in_mode(mode, torch._tensor_str._str_intern)
        stack.enter_context(patch.object(torch._tensor_str, "_str_intern", printed))
        stack.callback(mode.finish_work)
        stack.enter_context(mode)
        yield


_until_the_end = ExitStack()


def start() -> None:
    """Compute the values of kernels until the process ends, on this thread and those that it starts."""
    if not torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        _until_the_end.enter_context(numerics())
        atexit.register(_until_the_end.close)  # later, what it calls is gone
