"""What only a GPU can show of live detection: real waits, at their lines, with the time that CUPTI measures."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.errors import SyncError
from instrument.syncs.live import detect_syncs, no_syncs

pytestmark = pytest.mark.gpu


def here() -> int:
    return sys._getframe(1).f_lineno


@pytest.fixture
def x() -> torch.Tensor:
    tensor = torch.ones(1000, device="cuda")
    (tensor.sum() > 0).item()  # compiles what it needs
    torch.cuda.synchronize()
    return tensor


def busy(ms: float) -> None:
    """Keep the GPU busy for about so long."""
    torch.cuda._sleep(int(ms * 1_500_000))


def test_planted_waits(x: torch.Tensor) -> None:
    """Each is found at its line, with its operation and a time."""
    total, pinned = x.sum(), torch.ones(1000, pin_memory=True)
    with detect_syncs() as syncs:
        line = here()
        total.item()
        x.cpu()
        x[x > 0]
        torch.cuda.synchronize()
        if total > 0:
            pass
        f"{total}"
        x.tolist()
        torch.ones(1000).to("cuda")
        x.copy_(torch.ones(1000), non_blocking=True)
        torch.cuda.current_stream().synchronize()
        pinned.to("cuda", non_blocking=True)  # does not wait
    names = [
        "item",
        "cpu",
        "getitem",
        "synchronize",
        "bool",
        "-",
        "format",
        "tolist",
        "to",
        "copy_",
        "synchronize",
    ]
    expected = [(line + index, op, 1) for index, op in enumerate(names, 1) if op != "-"]
    found = sorted(syncs.findings, key=lambda found: found.site.line if found.site else 0)
    assert expected == [(one.site.line if one.site else 0, one.op, one.count) for one in found]
    assert all(one.timed == 1 for one in found)
    by_op = {one.op: one for one in found}
    assert ("D2H", 4000) == (by_op["cpu"].direction, by_op["cpu"].bytes)
    assert ("H2D", 4000) == (by_op["to"].direction, by_op["to"].bytes)


def test_clean_step(x: torch.Tensor) -> None:
    """A step that waits for nothing has no finding, at level "error" and inside `no_syncs` either."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 64, device="cuda")
    labels = torch.zeros(32, dtype=torch.long, device="cuda")

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(batch), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.where(loss > 1, loss, 0.0)

    step()
    with detect_syncs("error") as syncs, no_syncs():
        step()
    assert [] == syncs.findings


def test_restored(x: torch.Tensor) -> None:
    """The mode, the filters and what is wrapped are as before, also after an error that a wait raised."""
    before = torch.cuda.get_sync_debug_mode(), warnings.filters, list(warnings.filters), torch.cuda.synchronize
    line = here() + 2
    with pytest.raises(SyncError, match=f"test_gpu_syncs.py:{line}: "), no_syncs():
        x.sum().item()
    after = torch.cuda.get_sync_debug_mode(), warnings.filters, list(warnings.filters), torch.cuda.synchronize
    assert before == after
    assert "to" not in vars(torch.Tensor)


class Waits(torch.autograd.Function):
    """Waits in its backward, which runs on a thread of the GPU's."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient.sum().item()
        return gradient


def test_backward_in_python(x: torch.Tensor) -> None:
    """A wait in a backward of the user's is at its line, with the node and the region around backward."""
    with detect_syncs() as syncs, instrument.annotate("train"):
        Waits.apply(x.clone().requires_grad_()).sum().backward()
    (found,) = syncs.findings
    assert ("item", "WaitsBackward", 1, ("train",)) == (found.op, found.backward, found.timed, found.region)
    assert found.site is not None
    assert "gradient.sum().item()" == found.site.code


def test_backward_in_cpp(x: torch.Tensor) -> None:
    """A wait in a node of torch's is at the line that called backward."""
    value = torch.ones(8, requires_grad=True)
    result = value.cuda().sum()  # its backward copies to the CPU
    with detect_syncs() as syncs, instrument.annotate("train"):
        line = here() + 1
        result.backward()
    (found,) = syncs.findings
    assert found.site is not None
    assert (line, "backward", ("train",)) == (found.site.line, found.op, found.region)
    assert "ToCopyBackward" in (found.backward or "")


@pytest.mark.parametrize("ms", [1, 5, 50])
@pytest.mark.parametrize("how", ["item", "cpu", "synchronize", "stream", "event", "getitem"])
def test_blocked_time_is_that_of_cupti(x: torch.Tensor, ms: float, how: str, tmp_path: Path) -> None:
    """The time that a call waited is within 10% of what CUPTI measures of the calls of CUDA in it."""
    total, event, mask = x.sum(), torch.cuda.Event(), x > 0
    calls: dict[str, Callable[[], Any]] = {
        "item": lambda: total.item(),
        "cpu": lambda: x.cpu(),
        "synchronize": lambda: torch.cuda.synchronize(),
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "event": lambda: event.synchronize(),
        "getitem": lambda: x[mask],
    }
    calls[how]()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        with detect_syncs() as syncs, torch.profiler.record_function("planted"):
            busy(ms)
            event.record()
            calls[how]()
        torch.cuda.synchronize()
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    runtime = instrument.read_trace(path).runtime
    waits = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync"}
    longest = max(
        int(took)
        for name, took in zip(runtime.text("name"), runtime.duration_ns.tolist(), strict=True)
        if name in waits
    )
    (found,) = syncs.findings
    assert found.blocked_ns is not None
    assert longest >= 0.5e6 * ms
    assert abs(found.blocked_ns - longest) <= 0.1 * longest
