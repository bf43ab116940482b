"""The steps and collectives of a rank in a small file."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.explain.metrics.collectives import (
    RankTimes,
    arrivals,
    arrivals_of,
    format_rank_times,
    merge_rank_times,
    parse_rank_times,
)
from instrument.show.terminal.ranks import describe_ranks

from .made_loops import MadeLoop
from .test_job import REDUCE, job


def times_of(*ranks: list[int]) -> dict[int, RankTimes]:
    """Return the times of a job, each rank with its compute times by step."""
    return {rank: parse_rank_times(format_rank_times(trace, rank)) for rank, trace in job(*ranks).items()}


@given(st.lists(st.lists(st.integers(2, 899), min_size=3, max_size=3), min_size=2, max_size=4))
def test_the_file_has_all_that_the_comparison_needs(ranks: list[list[int]]) -> None:
    """The times of ranks give the same arrivals as their traces."""
    found = arrivals_of({rank: times.collectives for rank, times in times_of(*ranks).items()})
    assert arrivals(job(*ranks)) == found


def test_windows_are_compared_together() -> None:
    """Two windows of a rank are one sequence of steps."""
    whole = times_of([100] * 4, [800, 800, 300, 300])
    text = [
        format_rank_times(trace, rank).splitlines()
        for rank, trace in job(*[[100] * 4, [800, 800, 300, 300]]).items()
    ]
    parts = {
        rank: merge_rank_times(
            [
                parse_rank_times("\n".join([lines[0], *lines[1:3]])),
                parse_rank_times("\n".join([lines[0], *lines[3:]])),
            ]
        )
        for rank, lines in enumerate(text)
    }
    assert {rank: each.steps for rank, each in whole.items()} == {rank: each.steps for rank, each in parts.items()}
    assert arrivals_of({rank: each.collectives for rank, each in whole.items()}) == arrivals_of(
        {rank: each.collectives for rank, each in parts.items()}
    )


def test_the_sentences() -> None:
    """The summary says which rank is late, how late, and how long the others wait in a step."""
    assert describe_ranks(times_of([100] * 4, [800, 800, 800, 80], [100] * 4), [5, 6]) == [
        "Rank 1 arrives last at 3 of 4 collectives, 700 us late in the median: each other rank waits 525 us for "
        "it per step.",
        "Not compared, as they left no times beside the trace: rank 5, 6.",
    ]
    assert describe_ranks(times_of([100], [100]), []) == []


def test_a_file_is_small() -> None:
    """A window of thousands of collectives leaves less than 100 kB; the first steps are kept."""
    loop = MadeLoop(steps=40, busy=False)
    for step in range(40):
        for place in range(300):
            loop.work(REDUCE, 1000 * step + 2 * place, 1000 * step + 3 * place, 1000 * step + 3 * place + 2)
    text = format_rank_times(loop.trace(), 0)
    times = parse_rank_times(text)
    assert len(text) < 100_000
    assert list(range(6)) == [step - min(times.steps) for step in times.steps]
    assert 6 * 300 == sum(len(each.step) for each in times.collectives.values())


@given(st.data())
def test_damage(data: st.DataObject) -> None:
    """A damaged file is an error of one kind, or has other numbers."""
    text = format_rank_times(job([100, 200], [300, 400])[1], 1)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    damaged = text[:start] + data.draw(st.text('0123456789[]{},:"-e\n', max_size=9)) + text[stop:]
    try:
        times = parse_rank_times(damaged)
    except ValueError as error:
        assert "damaged times of a rank" in str(error)
    else:
        assert all(np.issubdtype(each.duration_ns.dtype, np.integer) for each in times.collectives.values())


@pytest.mark.parametrize("text", ["", "[]", "1", "{}", '{"rank": 0}', "\x00"])
def test_another_file(text: str) -> None:
    """A file of another kind is an error as well."""
    with pytest.raises(ValueError, match="damaged times of a rank"):
        parse_rank_times(text)
