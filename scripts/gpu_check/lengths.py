"""How long a step is where the CPU runs ahead of the GPU."""

from __future__ import annotations

import itertools

from .check import CheckContext, expect

_STEPS, _MATMULS = 10, 8


def ahead(context: CheckContext) -> None:
    """Steps of eight matmuls without a synchronization: their length on the GPU, against the GPU's own clock."""
    import torch

    import instrument
    from instrument.traces.read import read_file

    width = 64 if context.rehearsal else 8192
    a = torch.randn(width, width, device=context.device)
    event = context.cuda.Event

    def step() -> None:
        for _ in range(_MATMULS):
            a @ a

    for _ in range(3):
        step()
    context.cuda.synchronize()
    marks = [event(enable_timing=True) for _ in range(_STEPS + 1)]
    with instrument.profile(context.folder / "run", schedule=instrument.schedule(at=f"1-{_STEPS}")) as prof:
        prof.step()
        for mark, end in itertools.pairwise(marks):
            mark.record()
            step()
            end.record()  # before the window may end, and again as the next step begins
            prof.step()
        context.cuda.synchronize()
    truth_ns = (
        marks[1].elapsed_time(marks[-1]) * 1e6 / (_STEPS - 1)
    )  # from the end of the first step, as the loop's
    loop = instrument.metrics(read_file(context.trace(context.folder / "run", "ahead")))["loop"]
    gpu_ns = loop["gpu_step_ns"]
    share = gpu_ns / truth_ns
    context.figures["step_on_the_CPU_ms"] = loop["cpu_step_ns"] / 1e6
    context.figures["step_on_the_GPU_ms"] = gpu_ns / 1e6
    context.figures["by_the_clock_of_the_GPU_ms"] = truth_ns / 1e6
    expect(context.rehearsal or 0.95 < share < 1.05, f"{gpu_ns:.0f} ns, by the GPU's clock {truth_ns:.0f}")
    expect(context.rehearsal or loop["bound"] == "gpu", f"bound by {loop['bound']}: {loop['unknown']}")
