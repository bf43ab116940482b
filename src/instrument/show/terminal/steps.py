"""Describes the recorded steps: how long they took, what bounds the loop, and whether they are typical."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from statistics import median

from ...base.trace_marks import OWN_WORK
from ...base.units import counted, duration, durations, percent
from ...read.measures.region_steps import describe_steps_from
from ...read.measures.step_lengths import StepLengths
from ...read.measures.summary import Summary
from ...read.measures.timing import MIN_STEPS_AROUND, Stretch, Timing, is_similar

_MAX_LISTED_STEPS = 10  # steps; more are summarized
_OUTLIER_RATIO = 2  # times the median, or one part in so many: such a step is an outlier
_BUSY_SHARE = 0.95  # of a step's length on the GPU; a busier GPU is not mentioned
_MIN_RATIO_WITHOUT_DECIMAL = 9.95  # times as long; larger ratios have no decimal
_MIN_WAIT_SHARE = 0.01  # of a step; smaller waits are not mentioned
_MIN_EXPOSED_SHARE = 0.1  # of a step; smaller shares of exposed communication are not mentioned
_WINDOW = "of {} time after the first step"  # from the end of the first step, or of its GPU work


def headline(summary: Summary) -> str:
    """Return the mean length of a step on the CPU and on the GPU, and which steps were averaged."""
    steps = max(summary.steps, 1)
    time = duration(summary.step_ns / steps)
    on_gpu = [ns for _, ns in _gpu_lengths(summary)]
    if on_gpu:
        on_some = f" in {len(on_gpu)} of {steps} steps" * (len(on_gpu) < steps)
        time = f"CPU {time}, GPU {duration(sum(on_gpu) / len(on_gpu))}{on_some}{_busy(summary)}"
    elif summary.gpu_total_ns is not None:
        time += f", GPU work {duration(summary.gpu_total_ns / steps)}{_of_gpus(summary)}"
    if not summary.steps:
        return f"Where the time went: {time} (no steps marked)"
    which = _name_steps(summary.step_numbers, steps)
    return f"Where the step went: {time} ({f'mean of {which}' if steps > 1 else which}{_name_cut_steps(summary)})"


def _busy(summary: Summary) -> str:
    """Return how busy the GPU was during the steps, unless it was busy nearly all of the time."""
    steps = [step for step in (summary.lengths.steps if summary.lengths else ()) if step.gpu_ns is not None]
    busy_ns, all_ns = sum(step.gpu_busy_ns or 0 for step in steps), sum(step.gpu_ns or 0 for step in steps)
    return f", busy {100 * busy_ns / all_ns:.0f} %" if busy_ns < _BUSY_SHARE * all_ns else ""


def _of_gpus(summary: Summary) -> str:
    return f" on {summary.gpus} GPUs" if summary.gpus > 1 else ""


def _name_cut_steps(summary: Summary) -> str:
    """Name the steps that were cut short; the mean excludes them unless no other step was recorded."""
    cut = summary.cut_steps
    if summary.only_cut:
        return ", cut short"
    return f"; {_name_steps(cut, len(cut))} {'was' if len(cut) == 1 else 'were'} cut short" if cut else ""


def describe_steps(summary: Summary, *, below_verdict: bool = False) -> Iterator[str]:
    """Yield the sentences on the durations of the steps and on what bounds the loop.

    Args:
        summary: the summary.
        below_verdict: whether a verdict above says what bounds the step, and how long it is.
    """
    times = summary.step_times_ns
    if summary.steps_from:
        yield describe_steps_from(summary.steps_from)
    if len(times) > 1:
        clock = ", CPU" * bool(_gpu_lengths(summary))
        yield f"{_name_steps(summary.step_numbers, len(times)).capitalize()}{clock}: {_times(times)}"
        on_gpu = _gpu_lengths(summary)
        if on_gpu:
            which = _name_steps([number for number, _ in on_gpu], len(on_gpu)).capitalize()
            yield f"{which}, GPU: {_times([ns for _, ns in on_gpu])}"
        steps = list(zip(summary.step_numbers, times, strict=True))
        yield from _outliers(steps, " on the CPU" * bool(on_gpu), summary.step_ns)
        yield from _outliers(on_gpu, " on the GPU")
    if summary.lengths:
        yield from describe_lead(summary.lengths) if below_verdict else describe_loop(summary.lengths)
    if _gpu_lengths(summary) and summary.gpu_total_ns is not None:
        work = duration(summary.gpu_total_ns / max(summary.steps, 1))
        yield (
            f'"% step" is the share of the step on the CPU, "% GPU" the share of {work} of GPU work'
            f"{_of_gpus(summary)}, where kernels that run at the same time all count."
        )
        if summary.gpus > 1:
            yield (
                f"The trace has the work of {summary.gpus} GPUs: a step's length on the GPU spans the first start "
                "to the last end on all GPUs that it uses; shares of busy time and communication are their mean."
            )
    yield from _not_launched_here(summary)
    yield from _describe_cut_steps(summary)
    if summary.timing is not None:
        if not summary.only_cut:
            yield from _share_of_run(summary, summary.timing)
            yield from _compare_with_run(summary, summary.timing)
        if summary.timing.own_ns:
            own = duration(summary.timing.own_ns)
            yield f'While recording, the library itself worked for {own}, which the trace shows as "{OWN_WORK}".'


def _gpu_lengths(summary: Summary) -> list[tuple[int, int]]:
    """Return the number of each step that launched GPU work, and the time from its first start to its last end."""
    if summary.lengths is None:
        return []
    steps = zip(summary.step_numbers, summary.lengths.steps, strict=True)
    return [(number, step.gpu_ns) for number, step in steps if step.gpu_ns is not None]


def _times(times: Sequence[int]) -> str:
    if len(times) <= _MAX_LISTED_STEPS:
        middle = f" (median {duration(median(times))})" if len(times) > 2 else ""
        return f"{durations(times)}{middle}"
    return f"median {duration(median(times))}, from {duration(min(times))} to {duration(max(times))}"


def _outliers(steps: Sequence[tuple[int, int]], clock: str, whole_ns: int = 0) -> Iterator[str]:
    """Name the steps that took much longer or shorter than the others by one clock.

    With ``whole_ns``, their share of that time is given, too.
    """
    if len(steps) < 2:
        return
    times = [ns for _, ns in steps]
    middle = min(times) if len(times) == 2 else median(times)
    far: list[tuple[int, int]] = []
    near: list[int] = []
    for number, ns in steps:
        if ns > _OUTLIER_RATIO * middle or ns * _OUTLIER_RATIO < middle:
            far.append((number, ns))
        else:
            near.append(ns)
    if not far:
        return
    if len(far) > len(times) // 2:
        yield f"The steps differ widely{clock}: few are close to the mean."
        return
    which = _name_steps([number for number, _ in far], len(far)).capitalize()
    those = [ns for _, ns in far]
    took = (
        durations(those) if len(far) <= _MAX_LISTED_STEPS else f"{duration(min(those))} to {duration(max(those))}"
    )
    share = f", {percent(sum(those), whole_ns)} % of the time in the table below" if whole_ns else ""
    others = duration(median(near))
    than = f"the other took {others}" if len(times) == 2 else f"the others took {others} (median)"
    yield f"{which} took {took}{clock}{share}; {than}."


def _not_launched_here(summary: Summary) -> Iterator[str]:
    """Say how much GPU work has no launch in the trace, and where it is counted."""
    earlier, unknown = duration(summary.before_gpu_ns), duration(summary.by_time_gpu_ns)
    if summary.before_gpu_ns and summary.steps:
        yield f"{earlier} of GPU work was launched before the recording and is outside these steps."
    elif summary.before_gpu_ns:
        left_out = " and does not count" * bool(summary.outside_gpu_ns)
        yield f"{earlier} of the GPU work was launched before the recording{left_out}."
    if summary.by_time_gpu_ns and summary.steps:
        yield f"The launches of {unknown} of GPU work are not known; it counts toward the steps in which it ran."


def _describe_cut_steps(summary: Summary) -> Iterator[str]:
    """Say which windows are incomplete, and why."""
    recorded = set(summary.step_numbers)
    for planned, reason in summary.timing.endings if summary.timing else ():
        if not reason:
            continue
        first, last = planned or (0, -1)  # a window without a planned end lacks no step
        inside = sum(first <= number <= last for number in recorded)
        if inside == last - first + 1:
            yield f"Recorded in part: {reason}."
        elif inside:
            steps = f"{last - first + 1:,} steps {first}-{last}"
            yield f"Recorded so far: {inside:,} of the {steps}, because {reason}."


def _share_of_run(summary: Summary, timing: Timing) -> Iterator[str]:
    if not (timing.run_steps and timing.run_ns):
        return
    share = percent(min(summary.step_ns, timing.run_ns), timing.run_ns)
    untimed = ""
    if timing.untimed_steps is not None:
        first, last = timing.untimed_steps
        which = _name_steps(range(first, last + 1), last + 1 - first)
        untimed = f" (not counting {which}, whose start is unknown)"
    recorded = f"{summary.steps:,} of the first {timing.run_steps:,} steps"
    yield f"Recorded: {recorded}, {share} % of {duration(timing.run_ns)}{untimed}"


def _compare_with_run(summary: Summary, timing: Timing) -> Iterator[str]:
    """Compare the recorded steps with the steps around them, which are timed on the CPU."""
    steps, around = timing.around or (0, 0)
    if steps < MIN_STEPS_AROUND or not summary.step_times_ns:
        return
    ahead = summary.lengths is not None and summary.lengths.runs_ahead
    clock = ", on the CPU, which runs ahead" * ahead
    recorded = "the recorded steps" + " of all windows" * _has_several_windows(summary)
    took = median(summary.step_times_ns)
    ratio = took / (around or 1)
    stretch = Stretch.of(summary.step_times_ns, timing, summary.lengths)
    lengths = timing.lengths
    so = "so they are typical"
    if lengths is not None and not lengths.are_typical:
        so = f"but steps of usual length are only {100 * lengths.typical_share:.0f} % of the loop's time"
        so = f"but the steps of the run {lengths.became}" if lengths.change else so
    if is_similar(ratio):
        said = f"{recorded} took about as long (within 25 %), {so}"
    elif ahead and stretch is not None:
        said = f"{recorded} took about as long on the GPU (within 25 %), {so}"
    elif ahead or stretch is None:
        said = f"{recorded} took {ratio:.1f} times as long there, which says little about the loop"
    elif not stretch.is_certain:
        said = f"{recorded} took {duration(took)}: too few, or too varied, to say whether that is typical"
    elif ratio > 1:
        times = f"{stretch:.{1 if stretch.high < _MIN_RATIO_WITHOUT_DECIMAL else 0}f} times as long"
        said = f"{recorded} took {times}, which may be due to the recording"
    else:
        said = f"{recorded} took {stretch:.2f} times as long, so they are not typical"
    yield f"The {steps} steps around them took {duration(around)} (median{clock}); {said}."


def _has_several_windows(summary: Summary) -> bool:
    """Return whether steps between the recorded ones were not recorded."""
    numbers = sorted(summary.step_numbers)
    return any(later > earlier + 1 for earlier, later in pairwise(numbers) if earlier >= 0)


def _name_steps(numbers: Sequence[int], count: int) -> str:
    """Name the steps, as in "steps 2-4, 7"; if their numbers are not known, count them."""
    if not numbers or min(numbers) < 0 or len(set(numbers)) < count:
        return counted(count, "step")
    runs = groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])
    spans = [[number for _, number in run] for _, run in runs]
    shown = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    if len(shown) > _MAX_LISTED_STEPS:
        shown[_MAX_LISTED_STEPS // 2 : -1] = ["..."]
    return f"step{'s' * (count != 1)} {', '.join(shown)}"


def describe_loop(lengths: StepLengths) -> Iterator[str]:
    """Yield what bounds the loop, with the figures that show it, or why that is not known."""
    totals = lengths.totals
    if lengths.bound == "gpu":
        comm = totals.exposed_comm_ns
        bounds = "Communication" if 2 * comm > totals.gpu_ns else "The GPU"
        share = f", {percent(comm, totals.gpu_ns)} % of it exposed communication" * (
            comm > _MIN_EXPOSED_SHARE * totals.gpu_ns
        )
        yield f"{bounds} bounds the loop: {_describe_step(lengths)}{share}. {''.join(describe_lead(lengths))}"
    elif lengths.bound == "cpu":
        idle = percent(totals.gpu_waits_ns, totals.gpu_ns)
        yield (
            f"The CPU bounds the loop: {_describe_step(lengths)}, and the GPU idled "
            f"{idle} % {_WINDOW.format('the')}."
        )
    elif lengths.bound == "both":
        turns = "The loop synchronizes, so that CPU and GPU take turns"
        if not lengths.synchronizes:
            turns = "CPU and GPU take turns in bounding the loop, because launches fill the GPU's queue at times"
        idle, waits = percent(totals.gpu_waits_ns, totals.gpu_ns), percent(totals.cpu_waits_ns, totals.cpu_ns)
        yield (
            f"{turns}: {_describe_step(lengths)}; the GPU idled {idle} %, "
            f"the CPU for the GPU {waits} % {_WINDOW.format('their')}."
        )
    else:
        ahead = f" The CPU {_describe_run_ahead(lengths)}." if lengths.run_ahead_ns else ""
        yield f"It is not known whether the CPU or the GPU bounds the loop: {lengths.unknown}.{ahead}"
        if lengths.synchronized_step_ns is not None:
            yield f"Between synchronizations a step took {duration(lengths.synchronized_step_ns)}."


def describe_lead(lengths: StepLengths) -> Iterator[str]:
    """Yield how far the CPU ran ahead, and how long it or the GPU waited for the other, where that is known."""
    totals = lengths.totals
    if lengths.bound == "cpu":
        yield f"The GPU idled {percent(totals.gpu_waits_ns, totals.gpu_ns)} % {_WINDOW.format('the')}."
        return
    if lengths.bound is None and not lengths.run_ahead_ns:
        return
    waited = ""
    if lengths.bound is not None and totals.cpu_waits_ns > _MIN_WAIT_SHARE * totals.cpu_ns:
        full = " (in launches, because the GPU's queue was full)" * (
            2 * totals.queue_waits_ns > totals.cpu_waits_ns
        )
        waits = percent(totals.cpu_waits_ns, totals.cpu_ns)
        waited = f", and waited for the GPU {waits} % {_WINDOW.format('its')}{full}"
    yield f"The CPU {_describe_run_ahead(lengths)}{waited}."


def _describe_step(lengths: StepLengths) -> str:
    """Return how long a step takes, and by which clock."""
    step_ns = lengths.step_ns or 0
    if lengths.clock == "synchronizations":
        return f"a step took {duration(step_ns)} of wall time between synchronizations"
    if lengths.clock == "cpu":
        return f"a step took {duration(step_ns)} on the CPU"
    spans = [step.gpu_ns for step in lengths.steps if step.gpu_ns is not None]
    overlap = " (their work overlaps)" * (sum(spans) > 1.1 * step_ns * len(spans))
    return f"on the GPU a step ended every {duration(step_ns)}{overlap}"


def _describe_run_ahead(lengths: StepLengths) -> str:
    """Return how far the CPU ran ahead at the end of a step, at most."""
    _, most = lengths.run_ahead_ns or (0, 0)
    step_ns = lengths.gpu_step_ns
    if most <= _MIN_WAIT_SHARE * (step_ns or 0):
        return "did not run ahead"
    return f"ran up to {duration(most)}" + (f" ({most / step_ns:.1f} steps)" if step_ns else "") + " ahead"
