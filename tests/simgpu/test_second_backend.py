"""torch's second backend (``custom_profiler_config``) is told the regions, and its windows are saved.

It needs a CUPTI of 13.3, which the simulated one is not: a stand-in takes the place of what talks to CUPTI.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import instrument
from instrument.base.compat import profilers
from tests import simgpu

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]
MODULE = "torch.profiler._cupti.observers.profiler"
CONFIG = {"backend": "cupti_monitor", "cupti_monitor_async_export": True}


class StandIn:
    """The methods that torch calls, with what they do to files; it notes which ranges it is told."""

    available = True
    told: ClassVar[list[str]] = []

    def __init__(self, **_: Any) -> None:
        self._open: list[str] = []
        self._paths: tuple[str, str] | None = None

    def push_annotation(self, name: str) -> int:
        self._open.append(name)
        self.told.append("/".join(self._open))
        return len(self.told)

    def pop_annotation(self) -> None:
        self._open.pop()

    def open_window(self) -> None:
        pass

    def close_window(self) -> int:
        assert self._open == ["open at the end"]  # closed when torch has stopped
        return 1

    def set_export(self, _: int, cpu_trace: str, out: str) -> None:
        self._paths = cpu_trace, out if out.endswith(".gz") else f"{out}.gz"

    def join(self) -> None:
        assert not self._open
        assert self._paths is not None
        source, target = self._paths
        trace = json.loads(Path(source).read_text())
        trace["merged"] = True  # torch adds the kernels, without which launches would be missed
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") != "cuda_runtime"]
        with gzip.open(target, "wt") as file:
            json.dump(trace, file)


class Refused(StandIn):
    """What torch gets where CUPTI is older, or another tool has it."""

    available = False

    def push_annotation(self, name: str) -> None:
        pass

    def pop_annotation(self) -> None:
        pass

    def close_window(self) -> int:
        return 1


@pytest.fixture(params=[StandIn, Refused])
def observer(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[type[StandIn]]:
    (tmp_path / "packages" / "cupti").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    module = types.ModuleType(MODULE)
    vars(module)["ProfilerObserver"] = request.param
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(StandIn, "told", [])
    with torch.profiler.profile():  # after a first recording without the GPU, as here, Kineto records none of it
        pass
    yield request.param
    assert torch.autograd.profiler._active_cupti_profiler_observer is None


def test_a_window_of_the_second_backend(observer: type[StandIn], tmp_path: Path) -> None:
    """It is told our regions as well as torch's ranges, each once; without it, the window is of the CPU alone."""
    tensor = torch.ones(8, device="cuda")
    open_region = instrument.annotate("open at the end")
    with instrument.profile(tmp_path / "run", custom_profiler_config=CONFIG, on_summary=lambda _: None):
        with instrument.annotate("forward"):
            with torch.profiler.record_function("theirs"):
                tensor.add_(1)
            with instrument.annotate("inner"):
                tensor.mul_(2)
        open_region.__enter__()
    open_region.__exit__(None, None, None)

    (line,) = [json.loads(line) for line in (tmp_path / "run/manifest.jsonl").read_text().splitlines()]
    (trace,) = (tmp_path / "run").glob("*/*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))
    names = [event["name"] for event in events["traceEvents"] if event.get("cat") == "user_annotation"]
    assert {"forward", "theirs", "inner", "open at the end"} <= set(names)
    if observer is Refused:
        assert line["status"] == "partial"
        assert "custom_profiler_config" in line["reason"]
    else:
        assert line["status"] == "recorded", line["reason"]
        assert events["merged"]
        assert StandIn.told == ["forward", "forward/theirs", "forward/inner", "open at the end"]


@pytest.mark.skipif(importlib.util.find_spec("cupti") is not None, reason="cupti-python is installed")
def test_the_package_that_is_missing_is_named_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pip install cupti-python"):
        instrument.profile(tmp_path / "run", custom_profiler_config=CONFIG)


def test_other_recordings_use_the_functions_of_torch(observer: type[StandIn]) -> None:
    """There the second backend costs nothing."""
    assert profilers.range_functions() == (
        torch.autograd._record_function_with_args_enter,
        torch.autograd._record_function_with_args_exit,
    )
