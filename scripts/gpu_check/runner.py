"""Runs each check in its own process, within one deadline."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from .check import LOG, Check, CheckContext, FailedError, SkippedError, search_path

MODULE = ["-m", "scripts.gpu_check"]
LEAST_S = 10  # a check needs at least this to start
_MARK = "GPU_CHECK"  # environment variable of all processes that a check starts
_POLL_S = 0.05
_RESULT = "result.json"
Result = dict[str, Any]


def in_child(check: Check, context: CheckContext) -> None:
    """Run ``check`` in this process and write its result."""
    result: Result = {"status": "passed"}
    try:
        check.run(context)
    except SkippedError as error:
        result = {"status": "skipped", "reason": str(error)}
    except FailedError as error:
        result = {"status": "failed", "reason": str(error)}
    except Exception as error:
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    part = context.folder / "part"  # written completely or not at all if the process is killed
    found = {"figures": context.figures, "expected": context.expected}
    part.write_text(json.dumps(result | found, default=str))
    part.replace(context.folder / _RESULT)


class Child:
    """A check in its own process.

    Args:
        check: the check.
        device: "cuda" or "cpu".
        limit_s: time limit in seconds.
    """

    def __init__(self, check: Check, device: str, limit_s: float) -> None:
        self.check, self._limit_s = check, limit_s
        self._temporary = tempfile.TemporaryDirectory(
            prefix=f"gpu-check-{check.name}-", ignore_cleanup_errors=True
        )
        self._folder = Path(self._temporary.name)
        arguments = [check.name, "--child", str(self._folder), "--device", device, "--limit", f"{limit_s:.1f}"]
        self._began = time.monotonic()
        with (self._folder / LOG).open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *MODULE, *arguments], cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"PYTHONPATH": search_path(), _MARK: str(self._folder)},
            )  # fmt: skip

    def over(self) -> bool:
        """Return whether the process has ended or reached its time limit."""
        return self._process.poll() is not None or time.monotonic() - self._began >= self._limit_s

    def result(self, stopped: str = "") -> Result:
        """End the process and all that it started; return the result.

        Args:
            stopped: the reason if the check is ended early.
        """
        code = self._process.poll()
        seconds = round(time.monotonic() - self._began, 1)
        self._kill()
        try:
            ended: Result = json.loads((self._folder / _RESULT).read_text())
        except (OSError, ValueError):
            how = stopped or f"did not end in {self._limit_s:.0f} s"
            how = how if code is None else f"ended with code {code}"
            log = (self._folder / LOG).read_text(errors="replace")[-1500:]
            ended = {"status": "failed", "reason": f"{how}: {log}" if log else how}
        self._temporary.cleanup()
        return ended | {"seconds": seconds}

    def _kill(self) -> None:
        """Kill the process group, and processes that left it for another session, as vendors' tools do."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        mark = f"{_MARK}={self._folder}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver cannot be killed
            self._process.wait(2)


class Clock(Protocol):
    """The functions of `time` that `run` uses."""

    def monotonic(self) -> float:
        """Return the time in s."""

    def sleep(self, seconds: float) -> None:
        """Sleep for some seconds."""


class Stop:
    """Handles the signals that end a run, and keeps the `number` of the first."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Record a signal."""
        self.number = self.number or number

    def __enter__(self) -> Stop:
        """Install the handlers, except for ignored signals, such as SIGHUP under nohup."""
        taken = [number for number in self._SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = [(number, signal.signal(number, self)) for number in taken]
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers."""
        for number, handler in self._before:
            signal.signal(number, handler)


def run(
    checks: Sequence[Check],
    device: str,
    deadline: float,
    stop: Stop,
    note: Callable[[str, Result], None],
    *,
    clock: Clock = time,
    start: Callable[[Check, str, float], Child] = Child,
) -> None:
    """Run ``checks`` until ``deadline`` or a signal.

    Checks that may run concurrently do so first; those that run alone follow. If the time cannot suffice for all
    time limits, each check gets its share of the time left.

    Args:
        checks: the checks, by value.
        device: "cuda" or "cpu".
        deadline: the end of the last check, on ``clock``.
        stop: the signals received.
        note: called with the name and the result of each check, including those that were not run.
        clock: returns the time, and sleeps.
        start: starts a check on a device, with a time limit.
    """
    waiting = [*(check for check in checks if not check.alone), *(check for check in checks if check.alone)]
    at_once = max(1, min(4, (os.cpu_count() or 1) // 2))
    running: list[Child] = []
    try:
        while (waiting or running) and not stop.number:
            while waiting and len(running) < (1 if waiting[0].alone else at_once):
                limit_s = share_s(waiting, deadline - clock.monotonic(), at_once)
                check = waiting.pop(0)
                if limit_s < LEAST_S:
                    left_s = math.floor(10 * max(0, limit_s)) / 10  # rounding up could show the needed time
                    reason = f"{left_s:.1f} s were left for it, at least {LEAST_S} are needed"
                    note(check.name, {"status": "not run", "reason": reason, "seconds": 0.0})
                else:
                    running.append(start(check, device, limit_s))
            clock.sleep(_POLL_S)
            for child in [child for child in running if child.over()]:
                running.remove(child)
                note(child.check.name, child.result())
        name = signal.Signals(stop.number).name if stop.number else ""
        while running:
            child = running.pop(0)
            note(child.check.name, child.result(stopped=f"ended by {name}"))
        for check in waiting:
            note(check.name, {"status": "not run", "reason": f"ended by {name}", "seconds": 0.0})
    finally:  # no child stays on the GPU if a result cannot be recorded
        for child in running:
            child.result(stopped="ended by an error")


def share_s(waiting: Sequence[Check], left_s: float, at_once: int) -> float:
    """Return the time limit of the first of ``waiting``; the last check gets all of the time left."""
    check, *others = waiting
    if not others:
        return left_s
    needed_s = check.limit_s + sum(other.limit_s / (1 if other.alone else at_once) for other in others)
    return min(left_s, check.limit_s * min(1.0, left_s / needed_s))
