"""The calls of a dry run as a forecast takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import instrument
from instrument.forecast.forecast import Forecast, forecast_of
from instrument.forecast.gpus import GPUS
from instrument.forecast.recorded import step_calls, stream_notes
from instrument.forecast.table import packaged_table
from instrument.forecast.text import lines
from instrument.forecast.timeline import StepCall
from instrument.syncs.counting.step_counts import StepCounts

WIDTH, ROWS = 256, 64


def counted(step: Callable[[], object]) -> StepCounts:
    report = instrument.dry_run(step, fake=True)
    assert report.error is None
    assert report.counts is not None
    return report.counts.step


def families(calls: list[StepCall]) -> Counter[str]:
    return Counter(call.operation.family for call in calls if call.operation is not None)


def training_step() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH, bias=False)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with instrument.annotate("forward"):
            loss = model(torch.zeros(ROWS, WIDTH, device="cuda")).softmax(-1).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_matmuls_of_a_training_step() -> None:
    """A layer with a bias is a linear; the other and the backward passes are matmuls; dropout is one kernel."""
    found = families(step_calls(counted(training_step).span))
    assert found["linear"] == 1
    assert found["matmul"] == 1 + 3  # the first layer's input needs no gradient
    assert found["dropout"] == 1
    assert (found["softmax"], found["softmax backward"]) == (1, 1)


def test_the_optimizer_moves_all_states() -> None:
    """Its operators over lists of tensors count the bytes of all of them."""
    step = counted(training_step)
    weights = 4 * (2 * WIDTH * WIDTH + WIDTH)
    calls = zip(step_calls(step.span), step.span, strict=True)
    moved = sum(
        call.operation.bytes for call, (_, place) in calls if call.operation and place.phase == "optimizer"
    )
    assert moved > 7 * weights  # parameters, gradients and two moments are read, and all but the gradients written


def test_waits_and_copies() -> None:
    """`.item()` and copies of pageable memory wait; copies are no work of the GPU's multiprocessors."""

    def step() -> None:
        batch = torch.zeros(ROWS, WIDTH).cuda()
        batch.sum().item()
        batch.cpu()

    span = counted(step).span
    calls = step_calls(span)
    assert [note.kind for note in stream_notes(span)] == ["synchronize"] * 3
    assert families(calls) == Counter({"reduction": 1})


def test_forecast_by_region() -> None:
    """The regions of a step add up to the GPU's time, on each of the GPUs asked for."""
    found = forecast_of(counted(training_step), [GPUS["h100"], GPUS["mi300x"]], packaged_table())
    assert [each.gpu.name for each in found] == ["h100", "mi300x"]
    for each in found:
        assert abs(sum(each.regions.values()) / each.time.gpu_ns - 1) < 1e-6
    assert set(found[0].regions) == {"forward", ""}
    assert [each.is_bound for each in found] == [False, True]


def test_text_says_how_exact_it_is() -> None:
    """A forecast comes with the errors that were measured; a bound is called one."""
    found: list[Forecast] = forecast_of(counted(training_step), [GPUS["l4"], GPUS["b200"]], packaged_table())
    text = "\n".join(lines(found))
    assert "checked on 8 measured FP32 steps of other models: mean error 7%, worst 17%" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line[:1].strip()}
    assert "bound, not forecast" in rows["b200"]
    assert "bound" not in rows["l4"].removeprefix("bound by")


def test_no_less_than_nothing_is_hidden() -> None:
    """Rounding may make the exposed time longer than the communication."""
    (found,) = forecast_of(counted(training_step), [GPUS["l4"]], packaged_table())
    time = replace(found.time, communication_ns=1000.0, exposed_ns=1000.3)
    text = "\n".join(lines([replace(found, time=time)]))
    assert "exposed and 0 hidden" in text
