"""The time of collectives, and when they run."""

from __future__ import annotations

import pytest

from instrument.forecast.gpus import GPUS
from instrument.forecast.links import LINKS, Collective, collective_ns
from instrument.forecast.schedule import buckets, reduced
from instrument.forecast.steps import step_time
from instrument.forecast.timeline import StepCall
from instrument.syncs.counting.streams import COMMUNICATION, DEFAULT, StreamNote

from .tables import element_wise, table

H100 = GPUS["h100"]
GIB = 1 << 30
WORK = StepCall(element_wise(1 << 28))
SEND = StepCall(None, collective=Collective("all-reduce", GIB, 4))


def test_every_gpu_has_a_link() -> None:
    assert set(LINKS) == set(GPUS)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_large_all_reduce_moves_its_bytes_twice(gpu: str) -> None:
    """2 (n - 1) / n of them at the rate of the link; an all-gather takes half as long."""
    link = LINKS[gpu]
    rate = link.bytes_per_s * (3 if link.is_per_peer else 1)
    took = collective_ns(Collective("all-reduce", GIB, 4), GPUS[gpu])
    assert took == pytest.approx(1.5 * GIB / rate * 1e9, rel=0.02)
    assert collective_ns(Collective("all-gather", GIB, 4), GPUS[gpu]) == pytest.approx(took / 2, rel=0.02)


def test_small_collectives_take_a_latency() -> None:
    """That of six steps with the quickest protocol; one rank alone takes nothing."""
    assert collective_ns(Collective("all-reduce", 4, 4), H100) == pytest.approx(6_600 + 6 * 600, rel=0.01)
    assert collective_ns(Collective("all-reduce", GIB, 1), H100) == 0


def test_a_hidden_collective_is_cheaper_than_an_exposed_one() -> None:
    """It runs beside the work that follows, if the stream does not wait for it first."""
    calls = [WORK, SEND, *[WORK] * 100]
    over = StreamNote(2, "record", COMMUNICATION, 7)
    times = [
        step_time(calls, H100, table("h100"), [over, StreamNote(position, "wait", DEFAULT, 7)])
        for position in (2, 102)
    ]
    exposed, hidden = times
    alone = collective_ns(Collective("all-reduce", GIB, 4), H100)
    assert exposed.exposed_ns == pytest.approx(alone)
    assert hidden.exposed_ns == 0
    assert hidden.ns < exposed.ns
    assert hidden.communication_ns == exposed.communication_ns == pytest.approx(alone)
    assert hidden.most_ns - hidden.ns < exposed.most_ns - exposed.ns  # exposed communication was not measured


def test_collectives_run_one_after_the_other() -> None:
    """Two of them take twice as long; a step of little else is bound by the link."""
    once, twice = (step_time([WORK, *[SEND] * count], H100, table("h100")) for count in (1, 2))
    assert twice.exposed_ns - once.exposed_ns == pytest.approx(once.communication_ns, rel=0.01)
    assert twice.limit == "link"


def test_buckets() -> None:
    """The first is complete with 1 MiB, later ones with 25 MiB, the last with what is left."""
    mib = 1 << 20
    assert buckets([(1, mib), (2, 20 * mib), (3, 20 * mib), (4, mib)]) == [(1, mib), (3, 40 * mib), (4, mib)]
    assert buckets([]) == []


def test_reduced_gradients() -> None:
    """Every bucket leaves when it is complete, and all are awaited behind the last."""
    ready = [(2, 1 << 20), (3, 30 << 20)]
    calls, notes = reduced([WORK] * 4, (), ready, 4)
    sent = [(index, call.collective.bytes) for index, call in enumerate(calls) if call.collective]
    assert [number for _, number in sent] == [1 << 20, 30 << 20]
    assert [note.position > sent[-1][0] for note in notes if note.kind == "wait"] == [True, True]
    assert sum(call == WORK for call in calls) == 4
