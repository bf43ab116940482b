"""The numbers and regions of a dry run: equal to its counts, of the same step, with places that add up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import instrument
from instrument.base.findings import Site
from instrument.explain.contract.numbers import Spot
from instrument.syncs.counting.calls import Place
from instrument.syncs.counting.numbers import numbers_of
from instrument.syncs.dryrun.report import DryRunReport

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")


def train(layers: int = 3, mask: bool = False) -> DryRunReport:
    """Return the report of three steps, of which the first does more."""

    def run() -> None:
        model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(layers)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            with instrument.annotate("step"):
                x = torch.ones(2, 4).pin_memory().cuda(non_blocking=True)
                for number, layer in enumerate(model):
                    with instrument.annotate(f"layer_{number}"):
                        x = layer(x)
                if mask:
                    x = x[x > 0]
                if not step:
                    with instrument.annotate("first"):
                        print(x.sum().item())
                x.sum().backward()
                optimizer.step()

    return instrument.dry_run(run)


def test_numbers_are_the_counts() -> None:
    """Each number is that of the counts of the typical step, and each has places that add up to it."""
    report = train()
    assert report.counts is not None
    step, numbers = report.counts.step, report.numbers
    assert step.step == 2
    assert numbers["kernels"] == step.kernel_count
    assert {name: numbers[f"kernels.{name}"] for name in step.kernels} == step.kernels
    assert numbers["flops"] == step.flop_count
    assert numbers["flops.matmul.backward"] == step.flops["matmul"]["backward"]
    assert (numbers["operators"], numbers["memcpys"], numbers["memsets"]) == (
        step.operators,
        step.memcpys,
        step.memsets,
    )
    assert (numbers["read_bytes"], numbers["written_bytes"]) == (step.read, step.written)
    assert (numbers["h2d_bytes.pinned"], numbers["h2d_copies"], numbers["d2h_bytes"], numbers["syncs"]) == (
        32,
        1,
        0,
        0,
    )
    assert numbers["kernels.sort"] == 0
    for name in numbers:
        number = numbers.number(name)
        assert (number.exact, sum(number.places.values())) == (True, number.value), name


def test_regions_are_those_of_the_step() -> None:
    """The tree has the regions of the same step; those of the first step alone are not in it."""
    report = train()
    assert str(report.regions) == "step\n  layer_0\n  layer_1\n  layer_2"


def test_layers_are_one_place() -> None:
    """More than eight layers, whose names differ in their number, are one place."""
    report = train(layers=9)
    (spot,) = report.numbers.number("flops.matmul.forward").places
    assert spot.region == ("step", "layer_*")
    assert spot.text == "step > layer_*, tests/contract/test_numbers.py in train.<locals>.run: x = layer(x)"
    assert str(report.regions) == "step\n  layer_*  x9"


def test_sizes_that_depend_on_data() -> None:
    """Numbers of a step with an operator whose results depend on data are not exact."""
    numbers = train(mask=True).numbers
    assert not numbers.number("kernels").exact
    assert numbers.number("syncs").exact


def test_peak() -> None:
    """The peak of memory is a number with the places that hold it."""
    report = train()
    assert report.counts is not None
    site = Site(__file__, 3, "run")
    use = SimpleNamespace(place=Place("forward", ("step",), "", site, None), bytes=700)
    peak = numbers_of(report.counts, [], SimpleNamespace(peak_bytes=1024, uses=[use, use])).number("peak_bytes")
    assert (peak.value, peak.places) == (1024, {Spot(("step",), site): 1400})


def test_nothing_on_the_gpu() -> None:
    """A run that calls nothing on the GPU has numbers that are 0, and no regions."""
    report = instrument.dry_run(lambda: torch.ones(2).sum())
    assert (report.numbers["kernels"], report.numbers["operators"], str(report.regions)) == (0, 0, "")
