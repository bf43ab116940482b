"""A window on a thread ends before that thread does: torch crashes if a thread leaves its profiler on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bootstrap.programs import RUN, entries_in, run_warm, write

pytestmark = pytest.mark.process

TRAIN = """
import _thread, ctypes, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

import torch

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
done = threading.Event()

def train(steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    done.set()

def train_slowly():
    while True:
        train(1)
        time.sleep(0.5)

def then(call, *args):
    train()
    call(*args)

def in_thread(call, *args, **options):
    thread = threading.Thread(target=call, args=args, **options)
    thread.start()
    return thread

def fork():
    child = os.fork()
    if not child:
        train()
        os._exit(5)
    print(os.waitpid(child, 0)[1])
"""
SERVE = """
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

model = torch.nn.Linear(2, 2).eval()
done = threading.Event()
arrived = threading.Barrier(4)

def call(_=0):
    with torch.inference_mode():
        model(torch.ones(1, 2))

def call_in_turn(_):
    call()
    arrived.wait()

def call_once():
    call()
    arrived.wait()
    done.wait()

def call_often(calls):
    arrived.wait()
    for _ in range(calls):
        call()
    done.set()
"""
SERVERS = {
    "pool": "with ThreadPoolExecutor(4) as pool: list(pool.map(call_in_turn, range(60)))",
    "pool in which a thread has other work": """
arrived = threading.Barrier(2)
with ThreadPoolExecutor(4) as pool:
    pool.submit(call_once)
    pool.submit(call_often, 60)
""",
    "pool after a call on the main thread": """
call()
with ThreadPoolExecutor(1) as pool: list(pool.map(call, range(60)))
""",
}
SLOW_FIRST = """
class Slow(torch.nn.Linear):
    def forward(self, value):
        if arrived.n_waiting:  # the first call ends after calls of another thread
            arrived.wait()
            done.wait()
        return super().forward(value)

model, arrived = Slow(2, 2).eval(), threading.Barrier(2)

def call_slowly_first():
    for _ in range(6):
        call()

waits = threading.Thread(target=call_often, args=(3,))
waits.start()
while not arrived.n_waiting: pass
serves = threading.Thread(target=call_slowly_first)
serves.start()
serves.join()
"""
END = """
print([parameter.tolist() for parameter in model.parameters()])
print([thread.name for thread in threading.enumerate() if "Dummy" in thread.name])
"""
WAYS = {
    "ends": "in_thread(train).join()",
    "raises": "in_thread(then, lambda: 1 / 0).join()",
    "exits": "in_thread(then, sys.exit, 3).join()",
    "pool": "with ThreadPoolExecutor(2) as pool: pool.submit(train).result()",
    "pool that ends at exit": "ThreadPoolExecutor(2).submit(train).result()",
    "forks": "in_thread(then, fork).join()",
}
LEFT = {
    "os._exit": "in_thread(then, os._exit, 3).join()",
    "os._exit of a daemon": "in_thread(then, os._exit, 3, daemon=True).join()",
}
UNKNOWN = {
    "thread of C": """
callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: train())
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
libc.pthread_create(ctypes.byref(thread), None, callback, None)
libc.pthread_join(thread, None)
""",
    "low-level thread": "_thread.start_new_thread(train, ()); done.wait(); time.sleep(0.5)",
    "daemon that trains on": "in_thread(train_slowly, daemon=True); done.wait()",
    "daemon that waits": "in_thread(then, time.sleep, 600, daemon=True); done.wait()",
}


def compare(
    folder: Path, program: str, options: Sequence[str] = ("--steps", "all")
) -> tuple[int, list[dict[str, Any]]]:
    """Run a program plain and under `instrument run`; return the exit code of both, and the manifest."""
    write(folder, program)
    plain = run_warm(folder, [sys.executable, "train.py"])
    done = run_warm(folder, [*RUN, *options, "--", "train.py"])
    assert (plain.returncode, plain.stdout) == (done.returncode, done.stdout), done.stderr
    assert "failed and was skipped" not in done.stderr
    assert 1 >= done.stderr.count("Where the step went")
    return done.returncode, entries_in(folder / "runs/instrument")


@pytest.mark.parametrize("way", WAYS)
def test_end_of_a_thread(tmp_path: Path, way: str) -> None:
    """The window has the steps of the thread, and the program ends as without it."""
    code, (entry,) = compare(tmp_path, TRAIN + WAYS[way] + "\n" + END)
    assert 0 == code
    assert ("recorded", [0, 4]) == (entry["status"], entry["steps"])
    assert entry["files"]


@pytest.mark.parametrize("way", LEFT)
def test_a_thread_that_ends_the_process(tmp_path: Path, way: str) -> None:
    """`os._exit` on the thread of a window saves the window first, as on the main thread."""
    code, (entry,) = compare(tmp_path, TRAIN + LEFT[way])
    assert 3 == code
    assert ("recorded", [0, 4]) == (entry["status"], entry["steps"])
    assert entry["files"]


def test_threads_after_one_another(tmp_path: Path) -> None:
    """The window goes on in another trace, once the next thread has ended a step."""
    _, entries = compare(tmp_path, TRAIN + "for _ in range(3): in_thread(train).join()\n" + END)
    assert [("recorded", [0, 4]), ("recorded", [6, 9]), ("recorded", [11, 14])] == [
        (entry["status"], entry["steps"]) for entry in entries
    ]


@pytest.mark.parametrize("other", ["in_thread(train_quickly)", "in_thread(train, 3); train_quickly()"])
def test_two_trainings_at_once(tmp_path: Path, other: str) -> None:
    """The steps of a window are those of the thread on which it records, from its beginning on."""
    quick = """
def train_quickly():
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    while not begun.is_set(): pass
    for _ in range(20): other.step()
    done.set()

begun, zero_grad = threading.Event(), optimizer.zero_grad
def begin():
    zero_grad()
    begun.set()
    done.wait()
    optimizer.zero_grad = zero_grad
optimizer.zero_grad = begin
"""
    end = "done.wait(); time.sleep(0.2)" if "train_quickly()" in other else "train(3)"
    _, (entry,) = compare(tmp_path, f"{TRAIN}{quick}{other}\n{end}\n")
    assert ("recorded", [0, 2]) == (entry["status"], entry["steps"])


def test_a_thread_for_each_step(tmp_path: Path) -> None:
    """A window that three threads recorded no step of is given up, and its line says why."""
    _, entries = compare(tmp_path, TRAIN + "for _ in range(9): in_thread(train, 1).join()\n" + END)
    assert [("recorded", None), ("skipped", "the thread of the window ended before step 4")] == [
        (entry["status"], entry["reason"]) for entry in entries
    ]


@pytest.mark.parametrize("way", UNKNOWN)
def test_a_thread_whose_end_is_not_known(tmp_path: Path, way: str) -> None:
    """The window is lost, as its line says, but the program ends as without it."""
    code, (entry,) = compare(tmp_path, TRAIN + UNKNOWN[way] + "\nprint('end')")
    assert 0 == code
    assert "skipped" == entry["status"]
    assert "on another thread" in entry["reason"]


@pytest.mark.parametrize("server", SERVERS)
def test_calls_on_the_threads_of_a_pool(tmp_path: Path, server: str) -> None:
    """The window that is planned by default has calls of one thread, one that makes further calls."""
    _, (entry,) = compare(tmp_path, SERVE + SERVERS[server], [])
    assert ("recorded", [2, 4]) == (entry["status"], entry["steps"])


def test_a_first_call_that_ends_after_others(tmp_path: Path) -> None:
    """The steps of a window that begins with the first call are the calls of that thread."""
    _, (entry,) = compare(tmp_path, SERVE + SLOW_FIRST, ["--steps", "0-3"])
    assert ("recorded", [0, 3]) == (entry["status"], entry["steps"])
