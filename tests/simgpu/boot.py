"""Loads the simulated GPU before torch, in each Python process of an environment, where SIMGPU is set.

`install.py` copies this file into the environment, next to the libraries; it imports nothing of the project.
cuDNN is turned off when torch has been imported: it brings its own CUDA runtime, and wants a real driver.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent / "simgpu_lib"

# The first holds everything. All are loaded, so that whoever opens one by name gets this one.
LIBRARIES = (
    "libcudart.so.13", "libcupti.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcuda.so.1",
    "libnvidia-ml.so.1", "libnccl.so.2",
)  # fmt: skip


def is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def start_numerics() -> None:
    """Compute the values of kernels, where SIMGPU_NUMERICS is set."""
    if is_set("SIMGPU_NUMERICS"):
        import_module("simgpu_values").start()


def check_settings() -> None:
    """End the process if a setting in its environment isn't accepted."""
    try:
        import_module("simgpu_settings").check(os.environ)
    except ValueError as error:
        sys.stderr.write(f"the simulated GPU: {error}\n")
        os._exit(1)  # as `site` is imported: an exception would be a fatal error of Python


def renew() -> None:
    """Take the settings of the environment again, in a process that was forked from one with another."""
    if is_set("SIMGPU"):
        check_settings()
        ctypes.CDLL(None).sim_renew()
        start_numerics()


class TorchFinder:
    """Finds torch as others do, and turns cuDNN off when it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # who asks for it may not import it
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_turn_off(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            execute(module)
            module.backends.cudnn.enabled = False
            module._C._set_sdp_use_cudnn(False)
            module._C._set_sdp_use_cudnn = lambda enabled: None  # sdpa_kernel([...]) would turn it on again
            start_numerics()

        vars(spec.loader)["exec_module"] = execute_and_turn_off
        return spec


if is_set("SIMGPU"):
    check_settings()
    for library in LIBRARIES:
        ctypes.CDLL(str(FOLDER / library), mode=ctypes.RTLD_GLOBAL)
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(FOLDER))
    sys.meta_path.insert(0, TorchFinder())
