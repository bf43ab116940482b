"""What happens at the edges of a window."""

from __future__ import annotations

from typing import Any

from .check import Figures, Given, expect, python, recorded

PROGRAM = "scripts.gpu_check.programs.graph"
_REPLAYS = 100


def detector(given: Given) -> Figures:
    """A window beside a detector that raises, or has a budget: recorded, no finding, torch's profiler off."""
    import torch

    import instrument

    from .network import Training

    training = Training(given.device)
    training.step().item()
    ways: dict[str, dict[str, Any]] = {"error": {"level": "error"}, "budget": {"level": "error", "budget": 0}}
    for name, options in ways.items():
        plan = instrument.schedule(at="2-3")
        with (
            instrument.detect_syncs(**options) as syncs,
            instrument.profile(given.folder / name, schedule=plan) as prof,
        ):
            for _ in range(6):
                training.step()
                prof.step()
                syncs.step()
        expect(not syncs.findings, f"{name}: {syncs.report}")
        expect(not torch.autograd._profiler_enabled(), f"{name}: torch's profiler is still on")
        recorded(given.folder / name, [2, 3])
    return {}


def graph(given: Given) -> Figures:
    """A step that is a CUDA graph: the same losses; windows of the steps asked for, at the capture and later."""
    figures: Figures = {}
    for warm_ups in (3, 4):
        arguments = ("-m", PROGRAM, given.device, str(warm_ups), str(_REPLAYS))
        plain = python(*arguments).stdout
        for first, last in ((3, 5), (50, 52)):
            out = given.folder / f"{warm_ups}-{first}"
            run = ("-m", "instrument", "run", "--steps", f"{first}-{last}", "--out", out, "--", *arguments)
            under = python(*run)
            expect(under.stdout == plain, f"{out.name}: other losses: {under.stderr[-500:]}")
            recorded(out, [first, last])
            import instrument

            trace = instrument.read_trace(given.trace(out, f"graph_{out.name}".replace("-", "_")))
            figures[out.name] = {"kernels": len(trace.kernels)}
    return figures
