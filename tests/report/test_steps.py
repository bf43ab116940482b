"""Sentences on the durations of steps and on what bounds the loop."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from instrument.base.run_lengths import RunLengths
from instrument.read.measures.step_lengths import LoopTotals, StepLength, StepLengths
from instrument.read.measures.summary import Summary, merge
from instrument.read.measures.timing import Timing
from instrument.show.terminal.steps import describe_loop, describe_steps, headline

MS = 1_000_000


def summary(*times_ms: float, first: int = 2, timing: Timing | None = None) -> Summary:
    times = tuple(int(loop_totals * MS) for loop_totals in times_ms)
    numbers = tuple(number for number, _ in zip(count(first), times, strict=False))
    return Summary(len(times), sum(times), (), (), None, None, times, numbers, timing=timing)


def test_few_steps_are_listed() -> None:
    """Up to ten steps are listed with their times in one unit; the mean matches the tables."""
    recorded = summary(80, 214, 83, first=10)
    assert headline(recorded) == "Where the step went: 126 ms (mean of steps 10-12)"
    assert next(describe_steps(recorded)) == "Steps 10-12: 80.0, 214, 83.0 ms (median 83.0 ms)"


def test_single_step() -> None:
    """A single step is not compared with others."""
    assert headline(summary(80)) == "Where the step went: 80.0 ms (step 2)"
    assert list(describe_steps(summary(80))) == []


def test_many_steps_have_a_range() -> None:
    """More than ten steps are summarized by median and range."""
    (text,) = describe_steps(summary(*[5, 7] * 6, 6))
    assert text == "Steps 2-14: median 6.00 ms, from 5.00 ms to 7.00 ms"


def test_outliers() -> None:
    """Outliers are named, with their share of the time."""
    _, far = describe_steps(summary(5.8, 3.2, 104.3, 3.8, 3.6, 3.5))
    assert far == "Step 4 took 104 ms, 84.0 % of the time in the table below; the others took 3.60 ms (median)."
    _, far = describe_steps(summary(10, 50))
    assert far == "Step 3 took 50.0 ms, 83.3 % of the time in the table below; the other took 10.0 ms."
    _, far = describe_steps(summary(10, 50, 10, 50, 10, 11))
    others = "the others took 10.0 ms (median)."
    assert far == f"Steps 3, 5 took 50.0, 50.0 ms, 70.9 % of the time in the table below; {others}"
    _, far = describe_steps(summary(1, 20, 400, 8000))
    assert far == "The steps differ widely: few are close to the mean."


class Number(int):
    """An integer that counts comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Number.compared += 1
        return super().__eq__(other)

    __hash__ = int.__hash__


def test_many_outliers() -> None:
    """The comparisons are proportional to the number of steps."""
    many = summary(*[10, 10, 10, 50] * 250)
    many = replace(many, step_numbers=tuple(map(Number, many.step_numbers)))
    _, far = describe_steps(many)
    assert far.endswith("the others took 10.0 ms (median).")
    assert Number.compared < 10 * 1000


@pytest.mark.parametrize(
    ("around_ms", "expected"),
    [
        (3.5, "about as long (within 25 %), so they are typical."),
        (1.8, "the recorded steps took 2.0 times as long, which may be due to the recording."),
        (0.1, "the recorded steps took 36 times as long, which may be due to the recording."),
        (36, "so they are not typical."),
    ],
)
def test_typical_steps(around_ms: float, expected: str) -> None:
    """Recorded steps are compared with the unrecorded steps around them."""
    timing = Timing((int(around_ms * MS),), ((0, 19), (23, 42)), 240, 2_400 * MS)
    *_, share, typical = describe_steps(summary(3.6, 3.6, 3.6, timing=timing))
    assert share == "Recorded: 3 of the first 240 steps, 0.5 % of 2.40 s"
    assert typical.startswith("The 40 steps around them took ")
    assert typical.endswith(expected)


def test_steps_of_several_windows() -> None:
    """The figure of several windows says so: a diagnosis has that of the last window."""
    timing = Timing((MS,), ((0, 19),), 240, 2_400 * MS)
    apart = replace(summary(3, 3, 3, 3, timing=timing), step_numbers=(2, 3, 7, 8))
    assert "the recorded steps of all windows took 3.0 times as long" in " ".join(describe_steps(apart))
    together = replace(apart, step_numbers=(2, 3, 4, 5))
    assert "the recorded steps took 3.0 times as long" in " ".join(describe_steps(together))


def test_time_of_the_library() -> None:
    """The time that the library itself took inside windows is given, if any."""
    windows = [
        summary(3, 3, timing=Timing((3 * MS,), ((0, 19),), 22, 66 * MS, own_ns=own_ns)) for own_ns in (40 * MS, 0)
    ]
    expected = "While recording, the library itself worked for 40.0 ms"
    assert 1 == sum(expected in text for text in describe_steps(merge(windows)))
    assert not any("itself" in text for text in describe_steps(windows[1]))


def test_too_few_steps_around() -> None:
    """Two steps are too few to compare with."""
    for timing in (Timing((MS,), ((0, 1),), 5, 9 * MS), Timing((), (), 5, 9 * MS)):
        assert not any("around" in text for text in describe_steps(summary(3, 3, timing=timing)))


@pytest.mark.parametrize(
    ("slow_ns", "expected"),
    [
        (20 * MS, "so they are typical."),
        (1_500 * MS, "but steps of usual length are only 12 % of the loop's time."),
    ],
)
def test_typical_steps_of_a_loop_that_stalls(slow_ns: int, expected: str) -> None:
    """Steps are typical only if the loop spends at least 80 % of its time in such steps."""
    lengths = RunLengths(typical_steps=60, typical_ns=200 * MS, slow_steps=3, slow_ns=slow_ns)
    timing = Timing((4 * MS,), ((0, 19), (23, 42)), 63, 2_400 * MS, lengths=lengths)
    *_, typical = describe_steps(summary(3.6, 3.6, 3.6, timing=timing))
    assert typical.endswith(expected)


def test_several_windows() -> None:
    """All steps of several windows are named; the last window gives the run; a step around both counts once."""
    first = summary(3, 3, timing=Timing((3 * MS,), ((0, 1), (4, 7)), 8, 66 * MS))
    second = summary(3, 3, first=8, timing=Timing((3 * MS,), ((1, 1), (4, 7), (10, 19)), 30, 90 * MS))
    sentences = list(describe_steps(merge([first, second])))
    assert sentences[0] == "Steps 2-3, 8-9: 3.00, 3.00, 3.00, 3.00 ms (median 3.00 ms)"
    assert sentences[1] == "Recorded: 4 of the first 30 steps, 13.3 % of 90.0 ms"
    assert sentences[2].startswith("The 16 steps around them took 3.00 ms")


def test_windows_at_the_same_step() -> None:
    """Of two windows at the same step, the later gives the time of the run."""
    first, second = (Timing((), (), 5, ns, untimed) for ns, untimed in ((9, None), (12, (0, 0))))
    assert ((first + second).run_ns, (first + second).untimed_steps) == (12, (0, 0))


def test_window_that_was_cut() -> None:
    """The missing steps of a window are given with the reason, until a later part has them."""
    cut = (((2, 4), "the loop ended before step 4"),)
    first = summary(3, 3, timing=Timing((), (), 4, 9 * MS, endings=cut))
    expected = "Recorded so far: 2 of the 3 steps 2-4, because the loop ended before step 4."
    assert expected in list(describe_steps(first))
    rest = summary(3, first=4, timing=Timing((), (), 5, 12 * MS, endings=(((2, 4), ""),)))
    assert not any("so far:" in text for text in describe_steps(merge([first, rest])))


def test_steps_that_were_cut_short() -> None:
    """Steps that were cut short are named, and count only if no other step is recorded."""
    whole = summary(3, 3, first=2, timing=Timing((), (), 4, 9 * MS, cut_steps=(4,)))
    assert headline(whole) == "Where the step went: 3.00 ms (mean of steps 2-3; step 4 was cut short)"
    alone = summary(2, first=8, timing=Timing((), (), 8, 24 * MS, cut_steps=(8,)))
    assert headline(alone) == "Where the step went: 2.00 ms (step 8, cut short)"
    assert list(describe_steps(alone)) == []
    merged = merge([whole, alone])
    assert headline(merged) == "Where the step went: 3.00 ms (mean of steps 2-3; steps 4, 8 were cut short)"
    assert merge([alone, whole]).step_times_ns == merged.step_times_ns == whole.step_times_ns


def test_step_cut_short_and_recorded_again() -> None:
    """A step that was cut short and later recorded whole counts as recorded, in any order of windows."""
    cut = summary(3, first=2, timing=Timing((), (), 3, 9 * MS, cut_steps=(3,)))
    alone = summary(1, first=3, timing=Timing((), (), 3, 9 * MS, cut_steps=(3,)))
    whole = summary(3, 3, first=3, timing=Timing((), (), 5, 15 * MS))
    other = summary(3, first=8, timing=Timing((), (), 9, 24 * MS, cut_steps=(9,)))
    assert headline(merge([cut, whole])) == "Where the step went: 3.00 ms (mean of steps 2-4)"
    for windows in ([alone, whole], [whole, alone]):
        merged = merge(windows)
        assert headline(merged) == "Where the step went: 3.00 ms (mean of steps 3-4)"
        assert any("Recorded: 2 of the first 5 steps" in text for text in describe_steps(merged))
        assert headline(merge([merged, other])).endswith("(mean of steps 3-4, 8; step 9 was cut short)")
    twice = merge([alone, alone])
    assert twice.only_cut
    assert merge([twice, whole]).step_numbers == (3, 4)


def test_untimed_steps() -> None:
    """The share of the run names the excluded steps."""
    for untimed, which in ((None, ""), ((0, 0), "step 0"), ((0, 100), "steps 0-100")):
        note = f" (not counting {which}, whose start is unknown)" if which else ""
        timing = Timing((), (), 240, 2_400 * MS, untimed_steps=untimed)
        *_, share = describe_steps(summary(3.6, 3.6, timing=timing))
        assert share == f"Recorded: 2 of the first 240 steps, 0.3 % of 2.40 s{note}"


def test_steps_without_numbers() -> None:
    """Steps without distinct numbers are counted."""
    twice = merge([summary(3), summary(4)])
    assert headline(twice) == "Where the step went: 3.50 ms (mean of 2 steps)"


# With a GPU


def on_gpu(
    cpu_ms: tuple[float, ...],
    gpu_ms: tuple[float | None, ...],
    totals: LoopTotals,
    timing: Timing | None = None,
    busy: float = 1,
) -> Summary:
    """Return steps of these lengths, with the CPU 9 ms further ahead after each."""
    steps = [
        StepLength(int(cpu * MS), 0, 0, int(gpu * MS), None, number * 9 * MS, None, int(gpu * busy * MS))
        if gpu
        else StepLength(int(cpu * MS))
        for number, (cpu, gpu) in enumerate(zip(cpu_ms, gpu_ms, strict=True), 1)
    ]
    base = summary(*cpu_ms, timing=timing)
    return replace(base, lengths=StepLengths(tuple(steps), totals), gpu_total_ns=len(cpu_ms) * 12 * MS)


def loop_totals(**sums: int) -> LoopTotals:
    """Return sums in ms over two periods."""
    return LoopTotals(
        **{name: size * MS for name, size in {"busy_ns": 20, "known_ns": 20, **sums}.items()} | {"steps": 2}
    )


AHEAD = loop_totals(gpu_ns=20, cpu_ns=2)


def test_steps_without_gpu_work_are_not_in_the_mean_of_the_gpu() -> None:
    """As where records are lost: the headline says for how many steps its length on the GPU holds."""
    said = headline(on_gpu((1, 1, 1), (None, 10, 10), AHEAD))
    assert said == "Where the step went: CPU 1.00 ms, GPU 10.0 ms in 2 of 3 steps (mean of steps 2-4)"


def test_loop_that_runs_ahead() -> None:
    """The report has both lengths, how far the CPU ran ahead, and the base of each share."""
    recorded = on_gpu((1, 1, 1), (10, 10, 10), AHEAD)
    assert headline(recorded) == "Where the step went: CPU 1.00 ms, GPU 10.0 ms (mean of steps 2-4)"
    assert list(describe_steps(recorded)) == [
        "Steps 2-4, CPU: 1.00, 1.00, 1.00 ms (median 1.00 ms)",
        "Steps 2-4, GPU: 10.0, 10.0, 10.0 ms (median 10.0 ms)",
        "The GPU bounds the loop: on the GPU a step ended every 10.0 ms. "
        "The CPU ran up to 27.0 ms (2.7 steps) ahead.",
        '"% step" is the share of the step on the CPU, "% GPU" the share of 12.0 ms of GPU work, where kernels '
        "that run at the same time all count.",
    ]


@pytest.mark.parametrize(("busy", "expected"), [(0.96, ""), (0.08, ", busy 8 %"), (0, ", busy 0 %")])
def test_gpu_that_idles_within_steps(busy: float, expected: str) -> None:
    """The headline says how busy the GPU was, unless it was busy nearly all of the time."""
    (first, *_) = headline(on_gpu((1, 1), (10, 10), AHEAD, busy=busy)).partition(" (mean")
    assert first == f"Where the step went: CPU 1.00 ms, GPU 10.0 ms{expected}"


def test_several_gpus() -> None:
    """The report says how many GPUs there are, and how their numbers are combined."""
    text = " ".join(describe_steps(replace(on_gpu((1, 1), (10, 10), AHEAD), gpus=2)))
    assert '"% GPU" the share of 12.0 ms of GPU work on 2 GPUs, where' in text
    assert (
        "The trace has the work of 2 GPUs: a step's length on the GPU spans the first start to the last end"
        in text
    )
    assert headline(Summary(0, 9 * MS, (), (), 40 * MS, 40 * MS, gpus=2)) == (
        "Where the time went: 9.00 ms, GPU work 40.0 ms on 2 GPUs (no steps marked)"
    )


def test_steps_without_gpu_work() -> None:
    """Steps without GPU work are left out of the GPU lengths."""
    times = list(describe_steps(on_gpu((1, 1, 1, 1), (10, None, 10, 10), AHEAD)))
    assert times[:2] == [
        "Steps 2-5, CPU: 1.00, 1.00, 1.00, 1.00 ms (median 1.00 ms)",
        "Steps 2, 4-5, GPU: 10.0, 10.0, 10.0 ms (median 10.0 ms)",
    ]


def test_other_bounds() -> None:
    """The report says that the CPU bounds the loop, that both do, or that it is unknown, with the figures."""

    def text_of(totals: LoopTotals, gpu_ms: float | None = 10) -> str:
        lengths = on_gpu((1, 1, 1), (gpu_ms,) * 3, totals).lengths
        assert lengths is not None
        return " ".join(describe_loop(lengths))

    assert text_of(loop_totals(gpu_ns=24, cpu_ns=25, gpu_waits_ns=6)) == (
        "The CPU bounds the loop: a step took 12.5 ms on the CPU, and the GPU idled 25.0 % of the "
        "time after the first step."
    )
    synchronized = replace(
        loop_totals(gpu_ns=24, cpu_ns=25, gpu_waits_ns=6, cpu_waits_ns=12),
        synchronized_steps=3,
        synchronized_ns=39 * MS,
    )
    assert text_of(synchronized) == (
        "The loop synchronizes, so that CPU and GPU take turns: a step took 13.0 ms of wall time between "
        "synchronizations; the GPU idled 25.0 %, the CPU for the GPU 48.0 % of their time after "
        "the first step."
    )
    assert text_of(loop_totals(gpu_ns=24, cpu_ns=25, gpu_waits_ns=6, cpu_waits_ns=12, queue_waits_ns=10)) == (
        "CPU and GPU take turns in bounding the loop, because launches fill the GPU's queue at times: on the GPU "
        "a step ended every 12.0 ms; the GPU idled 25.0 %, the CPU for the GPU 48.0 % of their time "
        "after the first step."
    )
    assert text_of(loop_totals(gpu_ns=14, cpu_ns=14, cpu_waits_ns=7)) == (
        "The GPU bounds the loop: on the GPU a step ended every 7.00 ms (their work overlaps). "
        "The CPU ran up to 27.0 ms (3.9 steps) ahead, and waited for the GPU 50.0 % of its time after the "
        "first step."
    )
    assert text_of(loop_totals(gpu_ns=20, cpu_ns=20, exposed_comm_ns=12)).startswith(
        "Communication bounds the loop: on the GPU a step ended every 10.0 ms, 60.0 % of it exposed communication."
    )
    assert text_of(loop_totals(gpu_ns=20, cpu_ns=20, exposed_comm_ns=4)).startswith(
        "The GPU bounds the loop: on the GPU a step ended every 10.0 ms, 20.0 % of it exposed communication. "
    )
    full = loop_totals(gpu_ns=20, cpu_ns=20, cpu_waits_ns=10, queue_waits_ns=9)
    assert text_of(full).endswith(
        "50.0 % of its time after the first step (in launches, because the GPU's queue was full)."
    )
    assert text_of(LoopTotals()) == (
        "It is not known whether the CPU or the GPU bounds the loop: two successive steps with GPU work are "
        "needed. The CPU ran up to 27.0 ms ahead."
    )
    missing = LoopTotals(missing=4, synchronized_steps=2, synchronized_ns=26 * MS)
    assert text_of(missing, None) == (
        "It is not known whether the CPU or the GPU bounds the loop: the trace lacks the GPU work of 4 launches. "
        "Between synchronizations a step took 13.0 ms."
    )


def test_short_steps_of_a_loop_that_runs_ahead() -> None:
    """Steps before the queue is full are short on the CPU, and count toward the mean."""
    cpu_ms = (2, 10, 10, 10)
    for totals in (AHEAD, loop_totals(gpu_ns=20, cpu_ns=20, gpu_waits_ns=9)):
        sentences = [text for text in describe_steps(on_gpu(cpu_ms, (10,) * 4, totals)) if " took " in text]
        others = "the others took 10.0 ms (median)."
        assert sentences[0] == f"Step 2 took 2.00 ms on the CPU, 6.2 % of the time in the table below; {others}"
    assert any("Step 2 took 30.0 ms on" in text for text in describe_steps(on_gpu((30, 1, 1), (10,) * 3, AHEAD)))


def test_outliers_on_the_gpu() -> None:
    """An outlier on the GPU is named, without a share of the CPU time."""
    sentences = list(describe_steps(on_gpu((10,) * 4, (10, None, 90, 11), AHEAD)))
    assert sentences[2] == "Step 4 took 90.0 ms on the GPU; the others took 10.5 ms (median)."
    assert sum("took" in text for text in sentences) == 1
    sentences = list(describe_steps(on_gpu((10,) * 4, (1, 20, 400, 8000), AHEAD)))
    assert sentences[2] == "The steps differ widely on the GPU: few are close to the mean."


def test_work_without_its_launch() -> None:
    """Work without a launch is reported with where it counts; without steps, the tables include all of it."""
    recorded = replace(on_gpu((1, 1), (10, 10), AHEAD), before_gpu_ns=31 * MS, by_time_gpu_ns=2 * MS)
    sentences = list(describe_steps(recorded))
    assert sentences[-2] == "31.0 ms of GPU work was launched before the recording and is outside these steps."
    assert sentences[-1] == (
        "The launches of 2.00 ms of GPU work are not known; it counts toward the steps in which it ran."
    )
    whole = Summary(0, 9 * MS, (), (), 40 * MS, 40 * MS, before_gpu_ns=31 * MS, by_time_gpu_ns=2 * MS)
    assert list(describe_steps(whole)) == ["31.0 ms of the GPU work was launched before the recording."]


@pytest.mark.parametrize(
    ("around_ms", "expected"),
    [
        (1, "the recorded steps took about as long (within 25 %), so they are typical."),
        (10, "the recorded steps took about as long on the GPU (within 25 %), so they are typical."),
        (4, "the recorded steps took 0.2 times as long there, which says little about the loop."),
    ],
)
def test_steps_around_a_loop_that_runs_ahead(around_ms: int, expected: str) -> None:
    """Steps around the window are timed on the CPU; with a full queue they are as long as on the GPU."""
    timing = Timing((around_ms * MS,), ((0, 19),), 240, 2_400 * MS)
    *_, typical = describe_steps(on_gpu((1, 1, 1), (10, 10, 10), AHEAD, timing))
    assert typical == (
        f"The 20 steps around them took {around_ms}.0{'0' * (around_ms < 10)} ms (median, on the CPU, which runs "
        f"ahead); {expected}"
    )


@pytest.mark.parametrize("entry", [None, {}, {"timing": None}, {"timing": []}, {"timing": {"run_steps": "x"}}])
def test_missing_timing(entry: object) -> None:
    """A line of the manifest without a valid timing gives None."""
    assert Timing.from_manifest(entry) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 7, "x", [7], [[1]], [["a", 2]], [[0, 1, 2]]])
def test_damaged_timing(wrong: object) -> None:
    """Damaged values in a line are ignored."""
    timing = {"run_steps": 3, "run_ns": 9, "around_ns": wrong, "around_steps": wrong, "untimed_steps": wrong}
    found = Timing.from_manifest({"timing": timing, "planned_steps": wrong, "status": wrong, "reason": wrong})
    assert found == Timing((7,) if wrong == 7 else (), (), 3, 9, endings=((None, ""),))
