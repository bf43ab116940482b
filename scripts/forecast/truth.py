"""Compares forecasts with measured steps and traces, each left out of the table that forecasts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from instrument.forecast.gpus import GPUS
from instrument.forecast.links import Collective
from instrument.forecast.operator_time import operator_time
from instrument.forecast.recorded import step_calls, stream_notes
from instrument.forecast.schedule import reduced
from instrument.forecast.steps import StepTime, step_time
from instrument.forecast.table import Steps, Table, table_of
from instrument.forecast.timeline import StepCall
from instrument.syncs.dryrun.run import dry_run_file

from . import neusight, traces
from .families import build
from .neusight import Step
from .programs import MODELS, recorded

_SIGNIFICANT = 2  # standard errors
_GPUS = 4


class Check(NamedTuple):
    """A measured step and its forecast by a table that holds nothing of the model; ``today`` as in `calls`."""

    step: Step
    forecast: StepTime
    today: bool

    @property
    def error(self) -> float:
        """The error of the forecast, as a share of the measured time."""
        return self.forecast.ns / 1e6 / self.step.ms - 1

    @property
    def in_range(self) -> bool:
        """Whether the measured time lies in the range of the forecast."""
        return self.forecast.least_ns <= self.step.ms * 1e6 <= self.forecast.most_ns


class TraceCheck(NamedTuple):
    """The GPU time of a trace, its forecast without the trace, and the sum of the operators' errors; ns."""

    name: str
    measured_ns: float
    forecast_ns: float
    off_ns: float

    @property
    def error(self) -> float:
        """The error of the forecast, as a share of the measured time."""
        return self.forecast_ns / self.measured_ns - 1

    @property
    def off(self) -> float:
        """What each operator is off, without regard to its sign, as a share of the measured time."""
        return self.off_ns / self.measured_ns


def checks(folder: Path, trace_folder: Path, today: bool) -> list[Check]:
    """Return the measured steps on one GPU with their forecasts."""
    found = []
    for model in MODELS:
        table = _left_out(folder, trace_folder, model)
        found += [
            Check(step, _forecast(folder, step, table, today), today)
            for step in _steps(folder)
            if step.model == model
        ]
    return found


@lru_cache
def _left_out(folder: Path, trace_folder: Path, model: str) -> Table:
    """Return the table that holds nothing of a model."""
    return with_steps(table_of(build(folder, trace_folder, without=model)), folder, without=model)


def with_steps(table: Table, folder: Path, without: str | None = None) -> Table:
    """Return the table with how much longer steps took than their operators, but those of one model.

    A GPU has a factor where that is more than chance: where the mean is twice its standard error from 1.
    """
    logs: dict[str, list[float]] = {}
    for step in _steps(folder):
        if step.model != without:
            ratio = step.ms * 1e6 / _forecast(folder, step, table, today=False).ns
            logs.setdefault(step.gpu, []).append(log(ratio))
    gpus = dict(table.gpus)
    for name, of in logs.items():
        factor = _factor(of)
        errors = [abs(factor / exp(each) - 1) for each in of]
        steps = Steps(factor, round(mean(errors), 4), round(max(errors), 4), len(of))
        gpus[name] = replace(table.gpus[name], steps=steps)
    return replace(table, gpus=gpus)


def _factor(logs: Sequence[float]) -> float:
    if len(logs) < 3 or abs(mean(logs)) < _SIGNIFICANT * stdev(logs) / sqrt(len(logs)):
        return 1.0
    return round(exp(mean(logs)), 4)


class ParallelCheck(NamedTuple):
    """A measured step on four GPUs and its forecast.

    Attributes:
        step: the step.
        forecast_ms: with nothing of the communication hidden where it is that of gradients.
        hidden_ms: with the gradients reduced in buckets during the backward pass; None where there are none.
    """

    step: Step
    forecast_ms: float
    hidden_ms: float | None = None

    @property
    def error(self) -> float:
        """The error of the forecast, as a share of the measured time."""
        return self.forecast_ms / self.step.ms - 1

    @property
    def hidden_error(self) -> float | None:
        """The error with the reduction hidden."""
        return None if self.hidden_ms is None else self.hidden_ms / self.step.ms - 1


def parallel_checks(folder: Path, trace_folder: Path) -> list[ParallelCheck]:
    """Return the measured steps on four GPUs with their forecasts."""
    found = []
    for step in neusight.steps(folder):
        if step.model in MODELS and step.parallel in ("dp4", "pp4_1", "tp4"):
            table = _left_out(folder, trace_folder, step.model)
            if step.parallel == "dp4":
                found.append(_data_parallel(folder, step, table))
            elif step.parallel == "tp4":
                found.append(ParallelCheck(step, _tensor_parallel(folder, step, table).ns / 1e6))
            else:
                found.append(ParallelCheck(step, _forecast(folder, step, table, today=False).ns / 1e6))
    return found


def _data_parallel(folder: Path, step: Step, table: Table) -> ParallelCheck:
    """Forecast the share of a GPU, and the reduction of the gradients: after it, and hidden behind it."""
    gpu = GPUS[step.gpu]
    of = recorded(folder, step.model, step.sequence, step.batch // _GPUS, train=True, today=False)
    total = sum(number for _, number in of.ready)
    after = [*of.calls, StepCall(None, collective=Collective("all-reduce", total, _GPUS))]
    calls, notes = reduced(of.calls, (), of.ready, _GPUS)
    exposed, hidden = step_time(after, gpu, table), step_time(calls, gpu, table, notes)
    return ParallelCheck(step, exposed.ns / 1e6, hidden.ns / 1e6)


def _tensor_parallel(folder: Path, step: Step, table: Table) -> StepTime:
    """Forecast the script of `tensor_parallel`, run as one of four ranks, from its first module on."""
    config = folder / "models" / f"{step.model}.json"
    report = dry_run_file(
        f"{__package__}.tensor_parallel", None, fake=True, ranks=_GPUS,
        args=[str(config), str(step.batch), str(step.sequence)],
    )  # fmt: skip
    assert report.counts is not None, report.error
    span = report.counts.step.span
    begin = next(index for index, (_, place) in enumerate(span) if place.module)
    notes = [
        note._replace(position=note.position - begin) for note in stream_notes(span) if note.position >= begin
    ]
    return step_time(step_calls(span)[begin:], GPUS[step.gpu], table, notes)


def trace_checks(folder: Path, trace_folder: Path) -> list[TraceCheck]:
    """Return the traces with the forecasts of their operators."""
    found = []
    for name in traces.TRACES:
        table = table_of(build(folder, trace_folder, without=name))
        measured = forecast = off = 0.0
        for each in traces.operators(trace_folder / f"{name}.json.gz"):
            ns = operator_time(each.operation, GPUS["h100"], table).ns
            measured += each.ns * each.calls
            forecast += ns * each.calls
            off += abs(ns - each.ns) * each.calls
        found.append(TraceCheck(name, measured, forecast, off))
    return found


@lru_cache
def _steps(folder: Path) -> list[Step]:
    """Return the measured steps on one GPU of the models that have a program."""
    return [step for step in neusight.steps(folder) if step.parallel == "single" and step.model in MODELS]


def _forecast(folder: Path, step: Step, table: Table, today: bool) -> StepTime:
    of = recorded(folder, step.model, step.sequence, step.batch, step.kind == "train", today)
    return step_time(of.calls, GPUS[step.gpu], table)
