"""Length of steps when the CPU runs ahead of the GPU."""

from __future__ import annotations

import itertools

from .check import CheckContext, expect

_STEPS, _MATMULS = 10, 8


def ahead(context: CheckContext) -> None:
    """The GPU length of steps of eight matmuls without a synchronization agrees with the GPU's own clock."""
    import torch

    import instrument
    from instrument.read.jobs.read import read_file

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
            end.record()  # before a possible end of the window, and again at the start of the next step
            prof.step()
        context.cuda.synchronize()
    # From the end of the first step, like `gpu_step_ns`.
    truth_ns = marks[1].elapsed_time(marks[-1]) * 1e6 / (_STEPS - 1)
    loop = instrument.metrics(read_file(context.trace(context.folder / "run", "ahead")))["loop"]
    gpu_ns = loop["gpu_step_ns"]
    share = gpu_ns / truth_ns
    context.note("step on the CPU ms", loop["cpu_step_ns"] / 1e6)
    context.note("step on the GPU ms", gpu_ns / 1e6, "within 5 % of the GPU's clock")
    context.note("by the GPU's clock ms", truth_ns / 1e6)
    context.note("bound by", str(loop["bound"]), "gpu")
    expect(context.rehearsal or 0.95 < share < 1.05, f"{gpu_ns:.0f} ns, by the GPU's clock {truth_ns:.0f}")
    expect(context.rehearsal or loop["bound"] == "gpu", f"bound by {loop['bound']}: {loop['unknown']}")
