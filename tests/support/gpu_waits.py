"""A simulated GPU that synchronizes: torch's callbacks and warnings are real."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda import _gpu_trace as trace
from torch.optim.optimizer import _global_optimizer_post_hooks

from instrument.base.findings import Finding
from tests.support.native import SOURCES, cache_folder, compile_once


@cache
def native() -> Any:
    """Return the extension tests/native/gpuwaits.cpp, built once per torch and content, or skip the test."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the native test libraries are for Linux")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler: {compiler[0]} is not on PATH (set CXX)")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        pytest.skip(f"no headers of Python in {headers}")
    root, source = Path(torch.__file__).parent, SOURCES / "gpuwaits.cpp"
    includes = [headers, root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [
        *compiler, "-std=c++20", "-O0", "-fPIC", "-shared", abi,
        *(f"-I{folder}" for folder in includes), str(source), f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}",
        "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    text = f"{command} {torch.__version__} {sys.version}".encode() + source.read_bytes()
    library = cache_folder() / f"gpuwaits-{hashlib.sha256(text).hexdigest()[:16]}.so"
    compile_once(library, command)
    loader = importlib.machinery.ExtensionFileLoader("gpuwaits", str(library))
    spec = importlib.util.spec_from_file_location("gpuwaits", library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Gpu:
    """The simulated GPU of a test.

    Attributes:
        mode: torch's sync debug mode.
        x: a stand-in for a GPU tensor, whose methods synchronize.
        synchronized: the number of device synchronizations.
        in_backward: returns a tensor whose C++ backward synchronizes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._native = native()
        self.mode = self.synchronized = 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "_initialized", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch._C, "_cuda_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_get_sync_debug_mode", lambda: self.mode, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_set_sync_debug_mode", self._set_mode, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self._device())
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: self._device())
        self.x: Any = _tensor(self._native)
        self.in_backward = self._native.in_backward
        self.configure()

    def configure(self, **options: Any) -> None:
        """Choose how calls synchronize.

        Args:
            options: ``what`` is waited for ("stream", "event", "device"), for how many ``ms``, ``repeat`` times
                in one call; whether there is a ``trace`` hook and a ``warn``ing; the ``vendor`` it names.
        """
        self._options = options
        self._apply()

    def _set_mode(self, mode: int) -> None:
        self.mode = mode
        self._apply()

    def _apply(self) -> None:
        self._native.configure(**{"warn": self.mode == 1, **self._options})

    def _device(self) -> None:
        """Synchronize the device like `torch.cuda.synchronize`, for which torch does not warn."""
        self.synchronized += 1
        options = self._options
        self._native.configure(**{**options, "what": "device", "warn": False})
        try:
            self._native.wait()
        finally:
            self._apply()


def _tensor(native: Any) -> Any:
    class Tensor:
        """Its methods are functions in C: no frame of Python is between a line and what waits."""

        item = cpu = tolist = nonzero = backward = native.wait
        __getitem__ = __setitem__ = native.wait
        __bool__ = __contains__ = native.truth
        __float__ = __add__ = native.number
        __repr__ = __format__ = native.text

    return Tensor()


REGISTRIES = (
    trace.StreamSynchronizationCallbacks,
    trace.EventSynchronizationCallbacks,
    trace.DeviceSynchronizationCallbacks,
)


@cache
def imported() -> None:
    """Import the modules that torch imports on first use, which adds warning filters."""
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()
    with FakeTensorMode():
        torch.ones(3).is_pinned()


def _shown_before(module: Any) -> dict[Any, Any]:
    """Return the warnings that Python remembers for ``module``."""
    registry = vars(module).get("__warningregistry__", {})
    return {key: value for key, value in registry.items() if key != "version"}


_TESTS = ("tests.syncs", "tests.dryrun", "tests.stepping")


def state() -> list[Any]:
    """Return everything that detection replaces."""
    tensor = {name: vars(torch.Tensor).get(name) for name in ("to", "cuda", "cpu", "copy_")}
    return [
        torch.cuda.get_sync_debug_mode(),
        warnings.filters,
        list(warnings.filters),
        warnings.showwarning,
        warnings._showwarnmsg,  # type: ignore[attr-defined]
        warnings.onceregistry.copy(),  # type: ignore[attr-defined]
        [
            _shown_before(module)
            for name, module in list(sys.modules.items())
            if name.startswith(("tests.syncs", "tests.dryrun"))
        ],
        [list(registry.callback_list) for registry in REGISTRIES],
        torch.cuda.synchronize,
        torch.cuda.empty_cache,
        vars(torch.cuda.Event)["synchronize"],
        vars(torch.cuda.Stream)["synchronize"],
        torch.accelerator.synchronize,
        torch.autograd._engine_run_backward,
        torch._tensor_str._str,
        tensor,
    ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide a simulated GPU, and check after the test that everything is restored."""
    imported()
    simulated = Gpu(monkeypatch)
    before = state()
    hooks = dict(_global_optimizer_post_hooks)
    yield simulated
    assert before == state()
    assert before[1] is warnings.filters
    assert hooks == _global_optimizer_post_hooks


class Driver:
    """A torch built for CUDA in a program that has not used it yet; torch's own `_lazy_init` initializes.

    Attributes:
        calls: the calls of the driver.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name, value in [("_initialized", False), ("_cudart", object()), ("_queued_calls", [])]:
            monkeypatch.setattr(torch.cuda, name, value)  # torch's own queued calls query capabilities
        seeds = type(torch.cuda._lazy_seed_tracker)  # seeds that other tests set are queued as well
        monkeypatch.setattr(torch.cuda, "_lazy_seed_tracker", seeds())
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        asked = [(torch._C, "_cuda_init"), (torch._C, "_cuda_getDeviceCount")]
        asked += [(torch.cuda, "is_available"), (torch.cuda, "device_count")]
        for owner, name in asked:
            monkeypatch.setattr(owner, name, lambda name=name: self.calls.append(name) or 1, raising=False)


@pytest.fixture
def driver(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Provide the GPU of `gpu` before its initialization."""
    return Driver(monkeypatch)


def here() -> int:
    """Return the line number of the caller."""
    return sys._getframe(1).f_lineno


def shown(findings: list[Finding]) -> list[tuple[str, int, int]]:
    """Return operation, line and count of each finding, ordered by line."""
    rows = [(found.op, found.site.line if found.site else 0, found.count) for found in findings]
    return sorted(rows, key=lambda row: (row[1], row[0]))
