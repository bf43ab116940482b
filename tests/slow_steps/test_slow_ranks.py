"""Jobs of several ranks: rank 0 says which rank is slow, and in which phase, though all wait in backward."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import instrument
from instrument.record.slow_steps import rank_exchange, slow_ranks
from instrument.record.slow_steps.judging import PHASES
from instrument.record.slow_steps.own_work import OwnWork
from instrument.record.slow_steps.rank_exchange import RankExchange
from instrument.record.slow_steps.rank_judging import RankTimes, SlowRank
from instrument.record.slow_steps.slow_ranks import SlowRanks
from instrument.record.slow_steps.step_clock import StepClock
from instrument.record.slow_steps.step_numbers import PREFIX, StepNumbers

from ..support import programs, warm
from ..support.finishing import eventually

JOB = """
import dataclasses, json, sys
import torch, torch.distributed as dist
import instrument

root, mode, out = sys.argv[1:]
sys.path.insert(0, root)
from tests.support import ddp_training

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
INTERVAL = 3
told, numbers = [], []
function = instrument.slow_ranks(lambda slow: told.append(dataclasses.asdict(slow)))

def train(intervals, slow, phase):
    functions = [instrument.every(INTERVAL, each) for each in (function, numbers.append)]
    def more_ms(step, which):
        return 40 if rank == slow and step >= 12 * INTERVAL and which == phase else 0
    ddp_training.train(intervals * INTERVAL, functions, more_ms)

if mode == "restart":
    train(3, None, None)
    dist.destroy_process_group()
    if rank < size - 1:
        store = dist.FileStore(out + ".store", size - 1)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size - 1)
        train(22, 1, "backward")
else:
    train(22, 1, mode)
if rank == 0:
    json.dump({"told": told, "last": numbers[-1]}, open(out, "w"))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""


def run_job(folder: Path, mode: str, ranks: int) -> tuple[dict[str, Any], str]:
    """Run a job; return what rank 0 wrote, and what the ranks printed."""
    script = folder / "job.py"
    script.write_text(JOB)
    environment = programs.environment({"OMP_NUM_THREADS": "1", "INSTRUMENT_SUMMARY": "0"})
    done = warm.run(
        programs.python(script, [str(programs.ROOT), mode, str(folder / "out")]),
        environment,
        check=True,
        ranks=ranks,
    )
    return json.loads((folder / "out").read_text()), done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("mode", "ranks", "phase", "signal"),
    [("backward", 3, "backward", "cpu"), ("data", 3, "data", "wall"), ("restart", 4, "backward", "cpu")],
)
def test_the_slow_rank_is_named(tmp_path: Path, mode: str, ranks: int, phase: str, signal: str) -> None:
    """By the callback, the log and the numbers; also in a smaller job after a restart in the same processes."""
    result, stderr = run_job(tmp_path, mode, ranks)
    assert [(1, phase, signal)] == [(slow["rank"], slow["phase"], slow["signal"]) for slow in result["told"]]
    assert 0.02e9 < result["told"][0]["excess_ns"] < 0.2e9
    last = {name.removeprefix("instrument/"): value for name, value in result["last"].items()}
    assert (1, 1) == (last["slow_ranks"], last[f"slow_rank_{phase}"])
    assert last["ranks"] == (ranks - 1 if mode == "restart" else ranks)
    assert last[f"slow_rank_{phase}_excess_s"] > 0.02
    assert 1 == stderr.count("slow rank: rank 1")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the store of a job whose ranks are in this process."""
    store = dist.HashStore()
    monkeypatch.setattr(rank_exchange, "job_store", lambda prefix: dist.PrefixStore(prefix, store))
    monkeypatch.setattr(rank_exchange, "_LOOK_S", 0.005)
    monkeypatch.setattr(slow_ranks, "_numbers", count())
    begin_group()
    yield store
    dist.destroy_process_group()


def begin_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def key_of_rank_1(store: Any, number: int = 0) -> bytes:
    keys = dist.PrefixStore(f"{rank_exchange._PREFIX}{number}/", store)
    value: bytes = keys.get("1") if keys.check(["1"]) else b""
    return value


def new_clock() -> StepClock:
    return StepClock(32, PHASES, 0, lambda *_: None)


@pytest.fixture
def compared(store: Any) -> Iterator[SlowRanks]:
    """Return a function that compares the ranks, and ends that."""
    function = instrument.slow_ranks(patience=1)
    function.use_clock(new_clock())
    yield function
    function.close()


def call(function: SlowRanks, step: int, rank: int = 0) -> None:
    times = {f"{PREFIX}step": step, f"{PREFIX}step_time_mean_s": 0.01, f"{PREFIX}phase_data_s": 0.002}
    function(StepNumbers(times, first_step=step, rank=rank, world_size=2))


def comparisons() -> list[threading.Thread]:
    """Return the threads of the comparisons that run."""
    return [each for each in threading.enumerate() if each.name == "instrument slow ranks"]


def test_a_call_without_new_steps(store: Any, compared: SlowRanks) -> None:
    """The comparison goes on, as when a window ends with an epoch, and the interval counts once."""
    call(compared, 9, rank=1)
    begun = comparisons()
    for step in (19, 19, 29):
        call(compared, step, rank=1)
        assert comparisons() == begun
    eventually(lambda: b"[29," in key_of_rank_1(store))
    assert [29, 19] == [json.loads(line)[0] for line in key_of_rank_1(store).splitlines()]


def test_what_begins_a_new_comparison(compared: SlowRanks) -> None:
    """Steps that go back, and another process group, though it has as many ranks."""
    call(compared, 9)
    for step in (5, 6, 7, 8):
        begun = comparisons()
        if step > 5:
            dist.destroy_process_group()
            begin_group()
        call(compared, step)
        eventually(lambda begun=begun: len(comparisons()) == 1 and comparisons() != begun)


def test_which_times_are_work(store: Any, compared: SlowRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """In phases without collectives those of the clock and of the GPU, in all others those of the CPU."""
    phases = {"data": 1.0, "backward": 2.0}
    monkeypatch.setattr(OwnWork, "result", lambda self: {"cpu": phases, "gpu": phases})
    call(compared, 9, rank=1)
    call(compared, 19, rank=1)
    eventually(lambda: b"[19," in key_of_rank_1(store))
    step, _, work = json.loads(key_of_rank_1(store))
    assert (19, {"wall": {"data": 2e6}, "cpu": {"backward": 2.0}, "gpu": {"data": 1.0}}) == (step, work)


def test_two_loops(store: Any) -> None:
    """Each compares its own times, under keys of its own."""
    functions = [instrument.slow_ranks(), instrument.slow_ranks()]
    for number, function in enumerate(functions):
        function.use_clock(new_clock())
        for step in (9, 19 + number):
            call(function, step, rank=1)
    for number, function in enumerate(functions):
        eventually(lambda number=number: key_of_rank_1(store, number) != b"")
        assert 19 + number == json.loads(key_of_rank_1(store, number))[0]
        function.close()


def test_a_rank_that_is_found_at_the_end(store: Any) -> None:
    """It is told when the loop ends, not in the next training."""
    told: list[SlowRank] = []
    function = instrument.slow_ranks(told.append, patience=1)
    function.use_clock(new_clock())
    other = RankExchange(1, 2, lambda _: None)
    call(function, 0)
    eventually(lambda: getattr(function._exchange, "_store", None) is not None)
    for step in range(1, 8):
        numbers = function.numbers
        other.publish(RankTimes(step, 1e7, {"wall": {"data": 9e6 if step == 7 else 2e6}}))
        eventually(lambda step=step: f"[{step},".encode() in key_of_rank_1(store))
        call(function, step)
        if step < 7:
            eventually(lambda numbers=numbers: function.numbers is not numbers)
    function.close()
    other.end()
    assert [(1, "data", 7)] == [(slow.rank, slow.phase, slow.step) for slow in told]
    assert {} == function.numbers


def test_two_for_one_loop() -> None:
    """The second is refused: each would take the other's clock for the usual one."""
    for make in (instrument.black_box, instrument.profile):
        with pytest.raises(ValueError, match=re.escape('"on_steps" must have one slow_ranks() at most')):
            make(on_steps=[instrument.slow_ranks(), instrument.slow_ranks()])
    function = instrument.slow_ranks()
    for _ in range(2):  # one training after another
        clock = new_clock()
        function.use_clock(clock)
        function.use_clock(clock)  # goes on
        with pytest.raises(ValueError, match='"on_steps" must'):
            instrument.slow_ranks().use_clock(clock)


def test_a_phase_that_no_loop_has() -> None:
    """It would compare nothing; phases of one's own are known to the loop."""
    function = instrument.slow_ranks(local_phases=["dta", "other"])
    with pytest.raises(ValueError, match=r'"local_phases" must be phases of the loop, .*, optimizer: ..dta'):
        function.use_clock(new_clock())
    with instrument.black_box(on_steps=function, phases=["dta"]):
        pass


def test_a_job_of_one_rank_compares_nothing() -> None:
    """Nothing is started, and nothing is added to the numbers."""
    function = instrument.slow_ranks()
    function(StepNumbers({"instrument/step": 99, "instrument/step_time_mean_s": 0.01}))
    assert {} == function.numbers
    function.close()


@pytest.mark.parametrize(
    "wrong", [{"on_slow": 1}, {"local_phases": "data"}, {"local_phases": [1]}, {"patience": 0}, {"patience": "3"}]
)
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    """They fail at the call, with their name."""
    with pytest.raises((TypeError, ValueError), match=f'"{next(iter(wrong))}" must'):
        instrument.slow_ranks(**wrong)
