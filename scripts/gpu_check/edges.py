"""Windows with a synchronization detector, and windows around CUDA graphs."""

from __future__ import annotations

from typing import Any

from .check import CheckContext, expect, python, recorded

PROGRAM = "scripts.gpu_check.programs.graph"
WARM_UPS = (3, 4)
WINDOWS = ((3, 5), (50, 52))
_REPLAYS = 100
_LEAST_KERNELS = 5  # in a step: forward, backward and update


def detector(context: CheckContext) -> None:
    """A window inside a detector that raises or has a budget is recorded, without findings."""
    import torch

    import instrument

    from .network import Training

    training = Training(context.device)
    training.step().item()
    ways: dict[str, dict[str, Any]] = {"error": {"level": "error"}, "budget": {"level": "error", "budget": 0}}
    found = 0
    for name, options in ways.items():
        plan = instrument.schedule(at="2-3")
        with (
            instrument.detect_syncs(**options) as syncs,
            instrument.profile(context.folder / name, schedule=plan) as prof,
        ):
            for _ in range(6):
                training.step()
                prof.step()
                syncs.step()
        found += len(syncs.findings)
        context.note("findings", found, 0)
        expect(not syncs.findings, f"{name}: {syncs.report}")
        expect(not torch.autograd._profiler_enabled(), f"{name}: torch's profiler is still on")
        recorded(context.folder / name, [2, 3])
    context.note("windows recorded", len(ways), len(ways))


def graph(context: CheckContext) -> None:
    """A step that is a CUDA graph has the same losses, and its windows have the requested steps."""
    from instrument.read.jobs.read import read_file

    for warm_ups in WARM_UPS:
        arguments = ("-m", PROGRAM, context.device, str(warm_ups), str(_REPLAYS))
        plain = python(*arguments).stdout
        expect(plain.count("loss ") == warm_ups + _REPLAYS, f"the program alone printed {plain[-300:]!r}")
        for first, last in WINDOWS:
            out = context.folder / f"{warm_ups}-{first}"
            run = ("-m", "instrument", "run", "--steps", f"{first}-{last}", "--out", out, "--", *arguments)
            under = python(*run)
            expect(under.stdout == plain, f"{out.name}: other losses: {under.stderr[-500:]}")
            recorded(out, [first, last])
            trace = read_file(context.trace(out, f"graph_{out.name}".replace("-", "_")))
            kernels = len(trace.kernels)
            least = (last - first + 1) * _LEAST_KERNELS
            name = f"kernels in steps {first}-{last} after {warm_ups} warm-ups"
            context.note(name, kernels, f"at least {least}")
            expect(kernels >= least, f"{kernels} kernels in steps {first}-{last}, expected at least {least}")
