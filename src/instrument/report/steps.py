"""How long the recorded steps took, whether that is typical of the run, and how much of it they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

from ..regions.region import OWN_WORK
from ..traces.summary import Summary
from ..traces.timing import Timing
from ..units import counted, duration, durations, percent
from .loop import describe_loop

_LISTED = 10  # steps whose times are given one by one
_FAR = 2  # times the median, or that part of it, from which a step is not like the others
_ENOUGH = 3  # steps around a window, to say what is typical
_NEARLY_ALL = 0.95  # of a step's length on the GPU, from which it need not be said that the GPU worked
_ROUND = 9.95  # times as long, from which a decimal says nothing
_ALIKE = 1.25  # times slower or faster, up to which steps count as equally long


def headline(summary: Summary) -> str:
    """Return the mean length of a step on the CPU and on the GPU, and the steps that it is the mean of."""
    steps = max(summary.steps, 1)
    time = duration(summary.step_ns / steps)
    on_gpu = [ns for _, ns in _on_gpu(summary)]
    if on_gpu:
        time = f"CPU {time}, GPU {duration(sum(on_gpu) / len(on_gpu))}{_busy(summary)}"
    elif summary.gpu_total_ns is not None:
        time += f", GPU work {duration(summary.gpu_total_ns / steps)}{_of_gpus(summary)}"
    if not summary.steps:
        return f"Where the time went: {time} (no steps marked)"
    which = _which(summary.step_numbers, steps)
    return f"Where the step went: {time} ({f'mean of {which}' if steps > 1 else which}{_cut_short(summary)})"


def _busy(summary: Summary) -> str:
    """Say which part of the steps' lengths on the GPU that worked, unless it is nearly all."""
    steps = [step for step in (summary.lengths.steps if summary.lengths else ()) if step.gpu_ns is not None]
    busy_ns, all_ns = sum(step.gpu_busy_ns or 0 for step in steps), sum(step.gpu_ns or 0 for step in steps)
    return f", busy {100 * busy_ns / all_ns:.0f} %" if busy_ns < _NEARLY_ALL * all_ns else ""


def _of_gpus(summary: Summary) -> str:
    return f" on {summary.gpus} GPUs" if summary.gpus > 1 else ""


def _cut_short(summary: Summary) -> str:
    """Name the steps that were cut short; the mean leaves them out, unless no other step was recorded."""
    cut = summary.cut_steps
    if summary.only_cut:
        return ", cut short"
    return f"; {_which(cut, len(cut))} {'was' if len(cut) == 1 else 'were'} cut short" if cut else ""


def describe_steps(summary: Summary) -> Iterator[str]:
    """Yield the lines on the durations of steps."""
    times = summary.step_times_ns
    if len(times) > 1:
        clock = ", CPU" * bool(_on_gpu(summary))
        yield f"{_which(summary.step_numbers, len(times)).capitalize()}{clock}: {_times(times)}"
        yield from _gpu_times(summary)
        yield from _far(summary)
    if summary.lengths:
        yield from describe_loop(summary.lengths)
    if _on_gpu(summary) and summary.gpu_total_ns is not None:
        work = duration(summary.gpu_total_ns / max(summary.steps, 1))
        yield (
            f'"% step" is of the step on the CPU, "% GPU" of {work} of GPU work{_of_gpus(summary)}, in which '
            "kernels that run at the same time each count."
        )
        if summary.gpus > 1:
            yield (
                f"The trace has the work of {summary.gpus} GPUs: a step's length on the GPU is from the first "
                "start to the last end on all that it uses, and how busy they were, and communicated, is the mean."
            )
    yield from _not_launched_here(summary)
    yield from _cut(summary)
    if summary.timing is not None:
        if not summary.only_cut:
            yield from _share_of_run(summary, summary.timing)
            yield from _typical(summary, summary.timing)
        yield from _own_work(summary.timing)


def _on_gpu(summary: Summary) -> list[tuple[int, int]]:
    """The number of each step that launched GPU work, and how long that took, from first start to last end."""
    if summary.lengths is None:
        return []
    steps = zip(summary.step_numbers, summary.lengths.steps, strict=True)
    return [(number, step.gpu_ns) for number, step in steps if step.gpu_ns is not None]


def _gpu_times(summary: Summary) -> Iterator[str]:
    known = _on_gpu(summary)
    if known:
        which = _which([number for number, _ in known], len(known)).capitalize()
        yield f"{which}, GPU: {_times([ns for _, ns in known])}"


def _times(times: Sequence[int]) -> str:
    if len(times) <= _LISTED:
        middle = f" (median {duration(median(times))})" if len(times) > 2 else ""
        return f"{durations(times)}{middle}"
    return f"median {duration(median(times))}, from {duration(min(times))} to {duration(max(times))}"


def _far(summary: Summary) -> Iterator[str]:
    """Say which steps took much longer or shorter than the others, by each clock."""
    steps = list(zip(summary.step_numbers, summary.step_times_ns, strict=True))
    on_gpu = _on_gpu(summary)
    yield from _far_by(steps, " on the CPU" * bool(on_gpu), summary.step_ns)
    yield from _far_by(on_gpu, " on the GPU")


def _far_by(steps: Sequence[tuple[int, int]], clock: str, whole_ns: int = 0) -> Iterator[str]:
    """Say it by one clock; with ``whole_ns`` also what share of that time these steps took."""
    if len(steps) < 2:
        return
    times = [ns for _, ns in steps]
    middle = min(times) if len(times) == 2 else median(times)
    far: list[tuple[int, int]] = []
    near: list[int] = []
    for number, ns in steps:
        if ns > _FAR * middle or ns * _FAR < middle:
            far.append((number, ns))
        else:
            near.append(ns)
    if not far:
        return
    if len(far) > len(times) // 2:
        yield f"The steps differ widely{clock}: few of them are like the mean."
        return
    which = _which([number for number, _ in far], len(far)).capitalize()
    those = [ns for _, ns in far]
    took = durations(those) if len(far) <= _LISTED else f"{duration(min(those))} to {duration(max(those))}"
    share = f", {percent(sum(those), whole_ns)} % of the time in the table below" if whole_ns else ""
    others = duration(median(near))
    than = f"the other took {others}" if len(times) == 2 else f"the others took {others} (median)"
    yield f"{which} took {took}{clock}{share}; {than}."


def _not_launched_here(summary: Summary) -> Iterator[str]:
    """Say how much GPU work has no launch in the trace, and where it counts."""
    if summary.before_gpu_ns and summary.steps:
        earlier = f"{duration(summary.before_gpu_ns)} of GPU work"
        yield f"{earlier} was launched before the recording: it is outside of these steps."
    elif summary.before_gpu_ns:
        yield f"{duration(summary.before_gpu_ns)} of the GPU work was launched before the recording."
    if summary.by_time_gpu_ns and summary.steps:
        unknown = f"{duration(summary.by_time_gpu_ns)} of GPU work"
        yield f"The trace lacks the launches of {unknown}, which counts in the steps in which it ran."


def _cut(summary: Summary) -> Iterator[str]:
    """Say which windows lack some of the steps that were asked for, or something else, and why."""
    recorded = set(summary.step_numbers)
    for planned, reason in summary.timing.endings if summary.timing else ():
        if not reason:
            continue
        first, last = planned or (0, -1)  # without an end, no step is missing
        inside = sum(first <= number <= last for number in recorded)
        if inside == last - first + 1:
            yield f"Recorded in part: {reason}."
        elif inside:
            yield f"Recorded so far: {inside:,} of the {last - first + 1:,} steps {first}-{last}, as {reason}."


def _share_of_run(summary: Summary, timing: Timing) -> Iterator[str]:
    if timing.run_steps and timing.run_ns:
        share = percent(min(summary.step_ns, timing.run_ns), timing.run_ns)
        yield (
            f"Recorded: {summary.steps:,} of the {timing.run_steps:,} steps run so far, "
            f"{share} % of {duration(timing.run_ns)}{_untimed(timing)}"
        )


def _untimed(timing: Timing) -> str:
    if timing.untimed_steps is None:
        return ""
    first, last = timing.untimed_steps
    which = _which(range(first, last + 1), last + 1 - first)
    return f" (not counting {which}, whose start is unknown)"


def _typical(summary: Summary, timing: Timing) -> Iterator[str]:
    """Compare the recorded steps with those around them, which are timed on the CPU."""
    steps, around = timing.around or (0, 0)
    if steps < _ENOUGH or not summary.step_times_ns:
        return
    lengths = summary.lengths if summary.lengths and summary.lengths.runs_ahead else None
    clock = ", on the CPU, which runs ahead" if lengths else ""
    ratio = median(summary.step_times_ns) / (around or 1)
    if _alike(ratio):
        said = "the recorded ones took about as long (within 25 %), so they are typical"
    elif lengths and _alike((lengths.gpu_step_ns or 0) / (around or 1)):
        said = "the recorded ones took about as long on the GPU (within 25 %), so they are typical"
    elif lengths:
        said = f"the recorded ones took {_times_as_long(ratio)} there, which says little of the loop"
    elif ratio > 1:
        said = f"the recorded ones took {_times_as_long(ratio)}, which may be due to the recording"
    else:
        said = f"the recorded ones took {100 * ratio:.0f} % of that, so they are not typical"
    yield f"The {steps} steps around them took {duration(around)} (median{clock}); {said}."


def _times_as_long(ratio: float) -> str:
    return f"{ratio:.{1 if ratio < _ROUND else 0}f} times as long"


def _alike(ratio: float) -> bool:
    return max(ratio, 1 / (ratio or 1)) <= _ALIKE if ratio else False


def _own_work(timing: Timing) -> Iterator[str]:
    if timing.own_ns:
        yield (
            f"While recording, the library itself worked for {duration(timing.own_ns)}, "
            f'which the trace shows as "{OWN_WORK}".'
        )


def _which(numbers: Sequence[int], count: int) -> str:
    """Name the steps, as "steps 2-4, 7"; where their numbers are not known, say how many they are."""
    if not numbers or min(numbers) < 0 or len(set(numbers)) < count:
        return counted(count, "step")
    runs = groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])
    spans = [[number for _, number in run] for _, run in runs]
    shown = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    if len(shown) > _LISTED:
        shown[_LISTED // 2 : -1] = ["..."]
    return f"step{'s' * (count != 1)} {', '.join(shown)}"
