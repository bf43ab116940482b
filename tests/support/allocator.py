"""A stub of the functions of torch's CUDA allocator, which records the calls that reach it: there is no GPU.

It stands below `torch.cuda.memory`, whose own Python code runs, and behaves as torch 2.13: the history is a ring
of events, is forgotten when it is turned off, and an observer cannot be removed.
`tests/windows/test_gpu_memory.py` does the same on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from instrument.record.allocator_history import window_memory

FREE = 3 * 2**30  # bytes that the driver has left
STACK = [{"name": "forward", "filename": "/home/me/model.py", "line": 12}]


class Allocator:
    """The stub.

    Attributes:
        calls: the calls, by name, without queries.
        on: whether the history is on.
        events: the history.
        failing: the names of calls that raise.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.on = False
        self.events: list[dict[str, Any]] = []
        self.failing: dict[str, BaseException] = {}
        self._most = 1
        self._observers: list[Callable[[int, int, int, int], None]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch, *, initialized: bool = True) -> None:
        """Put the functions into torch until the test ends."""
        named_by_torch = torch.version.cuda is not None  # then a name that torch lacks is an error
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(window_memory.out_of_memory, "_attached", 0)
        monkeypatch.setattr(window_memory, "_logged", set())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._left)
        for name, function in {
            "_cuda_record_memory_history": self._record,
            "_cuda_isHistoryEnabled": lambda: self.on,
            "_cuda_memorySnapshot": self.snapshot,
            "_cuda_attach_out_of_memory_observer": self._attach,
        }.items():
            monkeypatch.setattr(torch._C, name, function, raising=named_by_torch)
        self.initialized = initialized
        real = window_memory.gpu.initialized
        monkeypatch.setattr(
            window_memory.gpu,
            "initialized",
            lambda kind: (torch.cuda if self.initialized else None) if kind == "cuda" else real(kind),
        )
        monkeypatch.setattr(window_memory.gpu, "in_use", lambda: None)

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.failing:
            raise self.failing[call[0]]

    def _record(self, enabled: Any, context: str, stacks: str, most: int, *_: Any) -> None:
        self._note("record", enabled, stacks, most if enabled else None)
        self.on = enabled is not None
        self._most = most
        if not self.on:
            self.events = []

    def snapshot(self, *_: Any) -> dict[str, Any]:
        self._note("snapshot")
        return {
            "segments": [], "device_traces": [list(self.events)], "allocator_settings": {},
            "external_annotations": [],
        }  # fmt: skip

    def _left(self, device: int) -> tuple[int, int]:
        if "left" in self.failing:
            raise self.failing["left"]
        return FREE, 80 * 2**30

    def _attach(self, observer: Callable[[int, int, int, int], None]) -> None:
        self._note("attach")
        self._observers.append(observer)

    def allocate(self, size: int = 512) -> None:
        """Allocate on the GPU, as a tensor does."""
        if self.on:
            now = time.time_ns() // 1000
            self.events.append(
                {"action": "alloc", "addr": 1024 * len(self.events), "size": size, "stream": 0, "time_us": now}
                | {"frames": STACK}
            )
            del self.events[: -self._most]

    def run_out(self, size: int = 2**40) -> None:
        """Fail to allocate, as torch does.

        Raises:
            torch.cuda.OutOfMemoryError: always.
        """
        for observer in self._observers:
            observer(0, size, 80 * 2**30, 2**20)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """The stub, in the place of torch's allocator."""
    made = Allocator()
    made.install(monkeypatch)
    return made
