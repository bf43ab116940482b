"""Names the differences between two recordings that a change of the program does not explain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..diagnosis.diagnosis_data import DiagnosisData
from ..diagnosis.trace_facts import TraceFacts
from ..traces.gpus import count_gpus
from ..traces.stretch import Stretch

_STRETCH = 1.3  # times: a profile that stretches one side so much more than the other hides the change
_VERSIONS = {
    "CUDA runtime": ("cuda_runtime_version",),
    "driver": ("cuda_driver_version", "CudaDriverVersion"),
    "HIP runtime": ("hip_runtime_version",),
}


class Difference(NamedTuple):
    """A difference between two recordings.

    Attributes:
        text: the difference, in words.
        prevents: whether the lengths of the steps say nothing about the program because of it.
    """

    text: str
    prevents: bool


def differences(before: DiagnosisData, after: DiagnosisData, change: float) -> list[Difference]:
    """Return the differences, those that prevent a comparison first.

    Args:
        before: one recording.
        after: the other one.
        change: the length of a step after / before, as recorded; 1 if no change was seen.
    """
    found = [*_of_machines(facts_of(before), facts_of(after)), *_of_recordings(before, after, change)]
    return sorted(found, key=lambda each: not each.prevents)


def facts_of(diagnosis: DiagnosisData) -> TraceFacts:
    """Return the facts of a diagnosis.

    Raises:
        ValueError: the diagnosis has none, as it was not made by `instrument.diagnose`.
    """
    if diagnosis.facts is None:
        raise ValueError("only diagnoses from instrument.diagnose can be compared")
    return diagnosis.facts


def _of_machines(before: TraceFacts, after: TraceFacts) -> Iterator[Difference]:
    one, two = _used_devices(before), _used_devices(after)
    if bool(before.trace.gpu) != bool(after.trace.gpu):
        which = "before" if before.trace.gpu else "after"
        yield Difference(f"only the trace {which} the change has GPU work", prevents=True)
    elif one and two and one != two:
        yield Difference(f"the devices differ: {', '.join(one)} and {', '.join(two)}", prevents=True)
    gpus = [count_gpus(facts.trace.gpu) for facts in (before, after)]
    if gpus[0] != gpus[1] and all(gpus):
        yield Difference(f"the numbers of GPUs differ: {gpus[0]} and {gpus[1]}", prevents=True)
    ranks = [facts.trace.world_size or 1 for facts in (before, after)]
    if ranks[0] != ranks[1]:
        yield Difference(f"the numbers of ranks differ: {ranks[0]} and {ranks[1]}", prevents=True)
    own = [facts.trace.rank for facts in (before, after)]
    if own[0] != own[1]:
        yield Difference(f"the ranks differ: {own[0]} and {own[1]}", prevents=False)
    for name, keys in _VERSIONS.items():
        versions = [_value(facts.trace.metadata, keys) for facts in (before, after)]
        if None not in versions and versions[0] != versions[1]:
            yield Difference(f"the versions of the {name} differ: {versions[0]} and {versions[1]}", prevents=False)


def _of_recordings(before: DiagnosisData, after: DiagnosisData, change: float) -> Iterator[Difference]:
    one, two = _stretch_of(before), _stretch_of(after)
    if one is not None and two is not None and _stretch_apart(one, two):
        text = f"recording made steps {one:.2f} and {two:.2f} times as long"
        yield Difference(text, prevents=_explains(one, two, change))
    if before.has_steps != after.has_steps:
        which = "before" if before.has_steps else "after"
        yield Difference(f"only the trace {which} the change has steps", prevents=True)
    formats = [facts_of(each).trace.format for each in (before, after)]
    if formats[0] != formats[1]:
        yield Difference(f"the profilers differ: {formats[0]} and {formats[1]}", prevents=False)
    options = [_value(facts_of(each).trace.metadata, ("with_stack",)) or 0 for each in (before, after)]
    if options[0] != options[1]:
        yield Difference("only one was recorded with stacks, which slows the CPU", prevents=False)


def _stretch_of(diagnosis: DiagnosisData) -> Stretch | None:
    ratio = diagnosis.stretch
    return None if ratio is None else Stretch(ratio, *(diagnosis.stretch_range or (ratio, ratio)))


def _stretch_apart(one: Stretch, two: Stretch) -> bool:
    """Return whether one stretch is much larger than the other, by more than chance."""
    less, more = sorted((one, two))
    return more.ratio > _STRETCH * less.ratio and more.low > less.high


def _explains(one: Stretch, two: Stretch, change: float) -> bool:
    """Return whether recording may be all of a change that is seen, or may hide one where none is seen."""
    less, more = sorted((one, two))
    grown = change if more is two else 1 / change  # in the direction of the recording
    return 1 <= grown <= more.high / less.low if less.low else True


def _used_devices(facts: TraceFacts) -> list[str]:
    """Return the product names of the GPUs that did work or, if the file numbers them differently, of all."""
    used = set(np.unique(facts.trace.gpu.device).tolist())
    names = {device.name for device in facts.trace.devices if device.id in used and device.name}
    return sorted(names or {device.name for device in facts.trace.devices if device.name})


def _value(metadata: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((metadata[key] for key in keys if key in metadata), None)
