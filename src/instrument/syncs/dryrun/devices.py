"""The pretended GPUs: their names and properties, the current one, and their random number generators."""

from __future__ import annotations

import os
import threading
import uuid
from typing import Any

import torch

GIB = 2**30
# Those of an A100: every table of peak figures lists it, and it lacks features that a CPU cannot imitate.
NAME = "NVIDIA A100-SXM4-80GB"
CAPABILITY = (8, 0)
TOTAL_MEMORY = 81154 * 2**20
ARCHITECTURES = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"


class Properties:
    """The result of `torch.cuda.get_device_properties`."""

    name = gcnArchName = NAME  # noqa: N815
    major, minor = CAPABILITY
    total_memory = TOTAL_MEMORY
    multi_processor_count = 108
    warp_size = 32
    max_threads_per_block = 1024
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 166912
    shared_memory_per_multiprocessor = 167936
    L2_cache_size = 40 * 2**20
    clock_rate = 1410000
    memory_clock_rate = 1593000
    memory_bus_width = 5120
    is_integrated = is_multi_gpu_board = 0
    pci_domain_id = pci_device_id = 0

    def __init__(self, index: int) -> None:
        self.uuid = uuid.UUID(int=index + 1)
        self.pci_bus_id = index + 1

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )


class _ThreadState(threading.local):
    """The index of the current device of one thread."""

    index = 0


class Devices:
    """The devices; each thread has a current one.

    Args:
        count: the number of devices.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._process = os.getpid()  # a GPU cannot be used after a fork
        self._thread = _ThreadState()

    @property
    def current(self) -> int:
        """The index of the current device of this thread."""
        return self._thread.index

    def select(self, index: int) -> None:
        """Make a device the current device of this thread."""
        if not 0 <= index < self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self._thread.index = index

    def exchange(self, index: int) -> int:
        """Make a device the current one, unless its index is negative; return the previous device, or -1."""
        if index < 0:
            return -1
        before = self.current
        self.select(index)
        return before

    def index(self, device: Any) -> int:
        """Return the index of ``device``, an argument of a function of `torch.cuda`."""
        if device is None or (isinstance(device, int) and device < 0):
            return self.current
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.current if index is None else index

    def is_gpu(self, device: Any) -> bool:
        """Return whether ``device``, an argument of a function of ``torch``, is a GPU; None counts as one."""
        return device is None or isinstance(device, int) or torch.device(device).type == "cuda"

    def generator(self, device: Any = "cpu") -> Generator | None:
        """Create a generator for ``torch.Generator(device)``; return None for another device."""
        return Generator(self.index(device)) if self.is_gpu(device) else None

    def replacements(self) -> dict[str, Any]:
        """Return the replacements of functions of ``torch._C`` about devices."""
        alike = {
            lambda: self.count: "_cuda_getDeviceCount _accelerator_deviceCount _accelerator_hooks_device_count",
            lambda: self.current: (
                "_cuda_getDevice _accelerator_getDeviceIndex _accelerator_hooks_get_current_device"
            ),
            self.select: "_cuda_setDevice _accelerator_setDeviceIndex _accelerator_hooks_set_current_device",
            self.exchange: (
                "_cuda_exchangeDevice _accelerator_exchangeDevice _accelerator_hooks_exchange_device "
                "_cuda_maybeExchangeDevice _accelerator_maybeExchangeDevice "
                "_accelerator_hooks_maybe_exchange_device"
            ),
        }
        return {name: function for function, names in alike.items() for name in names.split()} | {
            "_cuda_init": lambda: None,
            "_cuda_isInBadFork": lambda: os.getpid() != self._process,
            "_cuda_hasPrimaryContext": lambda index: True,
            "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
            "_cuda_getArchFlags": lambda: ARCHITECTURES,
            "_cuda_getCompiledVersion": lambda: 12080,
            "_accelerator_getAccelerator": lambda: torch.device("cuda"),
            "_get_accelerator": lambda check=None: torch.device("cuda"),
            "_accelerator_getDeviceCapability": lambda index: self.capability(),
        }

    def capability(self, device: Any = None, /) -> dict[str, Any]:
        """Replace `torch.accelerator.get_device_capability`, whose answers torch caches."""
        names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
        return {"supported_dtypes": {getattr(torch, name) for name in names.split()}}


_PHILOX = 16  # bytes in the state of a real GPU's generator: seed and offset


class Generator(torch._C.Generator):
    """A CPU generator that reports a GPU as its device."""

    # `__new__` is C code, and takes the real device
    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._offset = 0

    def __new__(cls, index: int = 0) -> Generator:
        """Create the generator on the CPU."""
        made: Generator = super().__new__(cls)
        return made

    @property
    def device(self) -> Any:  # type: ignore[override]  # an attribute in torch's stubs, read-only in fact
        """The GPU that the generator pretends to be on."""
        return torch.device("cuda", self._index)

    def set_state(self, new_state: Any) -> Any:
        """Set a state from `get_state`; of a real GPU's state, use only the seed."""
        if new_state.numel() == _PHILOX:
            return self.manual_seed(int.from_bytes(bytes(new_state.numpy()[:8]), "little"))
        super().set_state(new_state)
        return self

    def get_offset(self) -> int:
        """Return what `set_offset` set; it changes nothing."""
        return self._offset

    def set_offset(self, offset: int) -> Any:
        """Store ``offset``, which CPU generators do not have."""
        self._offset = offset
        return self

    def clone_state(self) -> Any:
        """Return another generator in the same state."""
        other = Generator(self._index)
        return other.set_state(self.get_state())

    def graphsafe_get_state(self) -> Any:
        """Return the state for `graphsafe_set_state`."""
        return self.clone_state()

    def graphsafe_set_state(self, state: Any) -> Any:
        """Take the state of another generator."""
        return self.set_state(state.get_state())

    def __reduce__(self) -> Any:
        return _restored, (type(self), self._index, self.get_state())


class DefaultGenerator(Generator):
    """The default generator of a device: the CPU's, from which every operator here draws."""

    get_state = staticmethod(torch.default_generator.get_state)
    seed = staticmethod(torch.default_generator.seed)
    initial_seed = staticmethod(torch.default_generator.initial_seed)

    def set_state(self, new_state: Any) -> Any:
        """Set the state of the CPU's generator."""
        if new_state.numel() == _PHILOX:
            return super().set_state(new_state)
        torch.default_generator.set_state(new_state)
        return self

    def manual_seed(self, seed: int) -> Any:
        """Seed the CPU's generator."""
        torch.default_generator.manual_seed(seed)
        return self


def _restored(kind: type[Generator], index: int, state: Any) -> Any:
    made = kind(index)
    return made if kind is DefaultGenerator else made.set_state(state)
