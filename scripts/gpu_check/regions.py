"""Regions of a window: on the CPU, on the GPU, and on the GPU lanes of the trace."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

from .check import CheckContext, expect, python


def _record_window(context: CheckContext, name: str) -> Path:
    """Record three steps with module regions and README's regions; return the trace."""
    import instrument

    from .network import Training

    training = Training(context.device)
    with (
        instrument.annotate_modules(training.model),
        instrument.profile(
            context.folder / name, schedule=instrument.schedule(wait=1, warmup=1, active=3)
        ) as prof,
    ):
        for _ in range(6):
            training.step()
            prof.step()
    return context.trace(context.folder / name, name)


def tree(context: CheckContext) -> None:
    """Outermost regions take no longer than the steps; backward's modules and GPU time are inside "backward"."""
    from instrument.read.jobs.read import read_file
    from instrument.read.measures.summary import summarize

    summary = summarize(read_file(_record_window(context, "regions")))
    outermost = {region.path[0]: region for region in summary.regions if len(region.path) == 1}
    cpu_ns = sum(region.cpu_ns for region in outermost.values())
    context.note("steps ms", summary.step_ns / 1e6)
    context.note("outermost regions on the CPU ms", cpu_ns / 1e6, "at most the steps")
    expect(cpu_ns <= summary.step_ns, f"outermost regions take {cpu_ns} ns of {summary.step_ns}")
    outside = [region.path for region in summary.regions if "(backward)" in region.path[-1]]
    outside = [path for path in outside if path[0] != "backward"]
    expect(not outside, f'not in "backward": {outside[:3]}')
    gpu_ns = {name: region.gpu_ns or 0 for name, region in outermost.items()}
    for name, ns in gpu_ns.items():
        context.note(f"{name} on the GPU ms", ns / 1e6, "more than 0" if name == "backward" else "")
    expect(gpu_ns.get("backward"), f'"backward" holds no GPU time: {gpu_ns}')
    modules_ns = sum(r.gpu_ns or 0 for r in summary.regions if r.path[0] == "backward" and len(r.path) == 2)
    context.note("modules in backward on the GPU ms", modules_ns / 1e6, "more than 0, at most backward's")
    expect(modules_ns, "the modules in backward hold no GPU time")
    expect(modules_ns <= gpu_ns["backward"], f"modules {modules_ns} ns of backward's {gpu_ns['backward']} ns")


def lanes(context: CheckContext) -> None:
    """Torch's GPU lane has names of regions only; the lanes of `summarize --add-gpu-lanes` show "backward"."""
    trace = _record_window(context, "lanes")
    events = _events(trace)
    of_torch = Counter(event["name"] for event in events if event.get("cat") == "gpu_user_annotation")
    regions = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    expect(context.rehearsal or of_torch, "torch's lane is empty")
    expect(of_torch.keys() <= regions, f"names on the lane that are no regions: {of_torch.keys() - regions}")
    out = context.folder / "lanes.json"
    python("-m", "instrument", "summarize", trace, "--add-gpu-lanes", out)
    added = [event for event in _events(out) if event.get("cat") == "gpu_region"]
    backward = [event for event in added if event["name"] == "backward"]
    shown = ", ".join(f"{name} {count}" for name, count in of_torch.items())
    context.note("ranges on the lanes that were added", len(added))
    context.note("of these backward", len(backward), "at least 3")
    context.note("on torch's lane", shown or "nothing", "names of regions")
    expect(len(backward) >= 3, f"backward is on the lanes that were added {len(backward)} times, expected 3")


def _events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    loaded = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, parse_float=Decimal)
    events: list[dict[str, Any]] = loaded["traceEvents"]
    return events


def handles(context: CheckContext) -> None:
    """Kernels after regions that ended out of order do not show under an ended region."""
    import torch

    import instrument

    with instrument.profile(context.folder / "handles", schedule=instrument.schedule(at="1")) as prof:
        a, b = torch.randn(256, 256, device=context.device), torch.randn(256, 256, device=context.device)
        prof.step()
        for _ in range(20):
            a.neg()  # the first kernels of a recording may be missing
        first, second = instrument.annotate("first"), instrument.annotate("second")
        first.__enter__()
        second.__enter__()
        a @ b
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        a + b  # outside of regions
        prof.step()
    events = _events(context.trace(context.folder / "handles", "handles"))
    kernels = [event for event in events if event.get("cat") == "kernel"]
    context.note("kernels", len(kernels), "more than 0")
    expect(kernels, "the window has no kernels")
    last = max(kernels, key=lambda event: event["ts"])
    over = [event for event in events if event.get("cat") == "gpu_user_annotation"]
    over = [event for event in over if event["ts"] <= last["ts"] < event["ts"] + event["dur"]]
    under = ", ".join(event["name"] for event in over) or "no region"
    context.note("the last kernel is under", under, "neither first nor second")
    stale = sorted({event["name"] for event in over} & {"first", "second"})
    expect(not stale, f"the last kernel, in no region, is under {stale}")
    shown = {event["name"] for event in events if event.get("cat") == "gpu_user_annotation"}
    expect(context.rehearsal or shown & {"first", "second"}, f"the matmul's region is not on the lane: {shown}")
