"""Ranks of a job open requested windows at the same step, and none waits for another."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from instrument.record.planning import agreement
from instrument.record.planning.agreement import Agreement
from instrument.record.planning.requests import WindowRequest

from ..support import programs, warm
from ..support.finishing import eventually

pytestmark = pytest.mark.process

JOB = """
import os, sys, time, torch, torch.distributed as dist, instrument
dist.init_process_group("gloo")
rank, mode, out = dist.get_rank(), sys.argv[2], sys.argv[1]
x = torch.ones(4)
ends = torch.zeros(1)
with instrument.profile(out, triggers="file", trigger_steps=2) as prof:
    end = time.monotonic() + 60
    step = 0
    while not ends:
        if mode == "absent" and rank == 1 and step == 20:
            break
        if step == 20:
            if mode == "one" and rank == 1:
                prof.trigger("rank 1 asks", steps=3)
            if mode == "all":
                prof.trigger(f"rank {rank} asks", steps=3)
            if mode == "absent":
                prof.trigger("rank 0 asks")
            if mode == "some" and rank == 0:
                prof.trigger("for rank 1", ranks=[1])
            if mode == "file" and rank == 0:
                open(os.path.join(out, "trigger"), "w").close()
        if mode == "dead" and step == 20 and rank == 1:
            prof.trigger("rank 1 asks and dies")
            time.sleep(1.2)
            os._exit(3)
        time.sleep(0.02)
        if mode in ("dead", "absent"):
            ends = torch.ones(1) if prof.windows or time.monotonic() > end else ends
        else:
            dist.all_reduce(x)
            x /= dist.get_world_size()
            over = len(prof.windows) > 0 or time.monotonic() > end or (mode == "some" and step > 250)
            ends = torch.ones(1) * float(over)
            dist.all_reduce(ends)
        prof.step()
        step += 1
    assert (x == 1).all()
if mode == "dead":
    os._exit(0)
dist.barrier()
dist.destroy_process_group()
"""


def run_job(folder: Path, mode: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a job; return the lines of its manifest by rank."""
    script = folder / "job.py"
    script.write_text(JOB)
    out = folder / "out"
    command = programs.python(script, [str(out), mode])
    environment = programs.environment({"OMP_NUM_THREADS": "1", "INSTRUMENT_SUMMARY": "0"})
    warm.run(command, environment, timeout=200, check=mode != "dead", ranks=ranks)
    lines = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda entry: entry["rank"])


@pytest.mark.parametrize(("mode", "reasons"), [("one", ["rank 1 asks"]), ("file", None)])
def test_all_ranks_open_a_window_at_the_same_step(tmp_path: Path, mode: str, reasons: list[str] | None) -> None:
    """A request of one rank, and a file that all ranks see, open one window, with the same steps on all ranks."""
    lines = [line for line in run_job(tmp_path, mode, ranks=4) if line["status"] == "recorded"]
    assert [0, 1, 2, 3] == [line["rank"] for line in lines]
    assert 1 == len({(line["window"], tuple(line["steps"])) for line in lines})
    assert all(line["opened_by"] == lines[0]["opened_by"] for line in lines)
    assert reasons in (None, lines[0]["opened_by"])


def test_eight_ranks(tmp_path: Path) -> None:
    """Eight ranks that share few cores open the window that one of them asks for at the same step."""
    lines = [line for line in run_job(tmp_path, "one", ranks=8) if line["status"] == "recorded"]
    assert list(range(8)) == [line["rank"] for line in lines]
    assert 1 == len({(line["window"], tuple(line["steps"]), tuple(line["opened_by"])) for line in lines})


def test_requests_of_all_ranks_are_one_window(tmp_path: Path) -> None:
    """Ranks that ask at the same step get one window, with all reasons."""
    lines = [line for line in run_job(tmp_path, "all") if line["status"] == "recorded"]
    assert [0, 1] == [line["rank"] for line in lines]
    assert {"rank 0 asks", "rank 1 asks"} == set(lines[0]["opened_by"]) == set(lines[1]["opened_by"])


def test_a_request_for_some_ranks(tmp_path: Path) -> None:
    """The other ranks record nothing."""
    assert [1] == [line["rank"] for line in run_job(tmp_path, "some") if line["status"] == "recorded"]


def test_a_rank_that_never_reaches_the_window(tmp_path: Path) -> None:
    """The others record theirs without it; its own line, if it knew of the request, says that it did not."""
    lines = run_job(tmp_path, "absent")
    assert (0, "recorded", ["rank 0 asks"]) == (lines[0]["rank"], lines[0]["status"], lines[0]["opened_by"])
    assert {"not reached"} >= {line["status"] for line in lines if line["rank"] == 1}


def test_a_rank_that_dies(tmp_path: Path) -> None:
    """A rank that dies after it asked leaves the others their window; they wait for nothing."""
    lines = run_job(tmp_path, "dead")
    assert [(0, "recorded", ["rank 1 asks and dies"])] == [
        (line["rank"], line["status"], line["opened_by"]) for line in lines
    ]


class LossyStore:
    """A store of one process; ``fails`` makes its writes raise."""

    def __init__(self) -> None:
        self._store = torch.distributed.HashStore()
        self.fails = False

    def add(self, key: str, amount: int) -> int:
        if self.fails and amount:
            raise ConnectionError("the store is gone")
        return int(self._store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> LossyStore:
    """The store of agreements, which ask it often."""
    made = LossyStore()
    monkeypatch.setattr(agreement, "POLL_S", 0.01)
    monkeypatch.setattr(agreement, "job_store", lambda prefix: made)
    return made


def test_a_request_survives_the_store(store: LossyStore, lenient: None) -> None:
    """What cannot be passed on becomes this rank's own request, and so does each one that follows."""
    decided: list[WindowRequest] = []
    made = Agreement.begin(decided.append, lambda: 1, lambda: 1)
    assert made is not None
    store.fails = True
    made.propose(WindowRequest("first"))
    made.propose(WindowRequest("second"))
    eventually(lambda: not made.active)
    made.propose(WindowRequest("third"))
    eventually(lambda: 3 == len(decided))
    assert [("first", None), ("second", None), ("third", None)] == [(each.reason, each.first) for each in decided]
    made.end()


def test_a_lost_entry_of_one_kind_costs_the_other_no_patience(
    store: LossyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a rank waits for a request whose rank died, a decision that is written late is not missed."""
    store.add("decision/count", 1)  # announced, and not written yet
    looks, check = Counter[str](), store.check

    def written_late(keys: list[str]) -> bool:
        looks.update(keys)
        if looks.total() == 3:
            store.add(
                "ask/count", 1
            )  # the 10th look of both is then for it, and a shared count drops the decision
        if keys == ["decision/1"] and looks["decision/1"] == 9:  # of the 10 before it is given up
            store.set("decision/1", '{"reason": "late", "active": 1, "warmup": 0, "first": 9, "ranks": null}')
        return check(keys)

    monkeypatch.setattr(store, "check", written_late)
    decided: list[WindowRequest] = []
    made = Agreement.begin(decided.append, lambda: 1, lambda: 1)
    assert made is not None
    eventually(lambda: bool(decided))
    made.end()
    assert ["late"] == [each.reason for each in decided]
    assert looks["ask/1"] > 5  # it was waited for meanwhile


def test_a_jump_of_the_step_number_is_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the jump to a checkpoint's step, a window is agreed a few steps ahead of it."""
    monkeypatch.setattr(agreement, "POLL_S", 0.01)
    monkeypatch.setattr(agreement, "job_store", lambda prefix: torch.distributed.HashStore())
    step, done = 10, 0
    decided: list[WindowRequest] = []
    made = Agreement.begin(decided.append, lambda: step, lambda: done)
    assert made is not None
    time.sleep(0.05)  # a few polls
    step, done = 100_000, 1
    time.sleep(0.05)
    made.propose(WindowRequest("asked", 3, 1))
    eventually(lambda: bool(decided))
    made.end()
    assert 100_000 < (decided[0].first or 0) < 101_000


@pytest.mark.parametrize(("step", "first"), [(10, 22), (30, 34), (32, 40)])
def test_what_recurs_is_agreed_for_a_later_turn(store: LossyStore, step: int, first: int) -> None:
    """All ranks record the first turn that they all reach in time; other requests do not wait for it."""
    decided: list[WindowRequest] = []
    made = Agreement.begin(decided.append, lambda: step, lambda: step)
    assert made is not None
    made.propose(WindowRequest("a stall", first=22, every=6))
    made.propose(WindowRequest("asked"))
    eventually(lambda: 2 == len(decided))
    made.end()
    assert [first, step + 3] == [each.first for each in decided]
