"""Runs checks in processes of their own, within one deadline."""

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
LEAST_S = 10  # a check is not started with less
_MARK = "GPU_CHECK"  # the environment variable that what a check starts has in common
_POLL_S = 0.05
_RESULT = "result.json"
Result = dict[str, Any]


def in_child(check: Check, context: CheckContext) -> None:
    """Run ``check`` in this process and write down how it ended."""
    result: Result = {"status": "passed"}
    try:
        check.run(context)
    except SkippedError as error:
        result = {"status": "skipped", "reason": str(error)}
    except FailedError as error:
        result = {"status": "failed", "reason": str(error)}
    except Exception as error:
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    part = context.folder / "part"  # a process that is killed leaves all of it or none
    found = {"figures": context.figures, "expected": context.expected}
    part.write_text(json.dumps(result | found, default=str))
    part.replace(context.folder / _RESULT)


class Child:
    """A check that runs in a process of its own.

    Args:
        check: which one.
        device: "cuda" or "cpu".
        limit_s: after how long it is ended.
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
        """Tell whether it ended, or has taken the time that it may."""
        return self._process.poll() is not None or time.monotonic() - self._began >= self._limit_s

    def result(self, stopped: str = "") -> Result:
        """End it, with all that it started, and return how it ended.

        Args:
            stopped: why it was ended before its time, if so.
        """
        code = self._process.poll()
        seconds = round(time.monotonic() - self._began, 1)
        self._end()
        try:
            ended: Result = json.loads((self._folder / _RESULT).read_text())
        except (OSError, ValueError):
            how = stopped or f"did not end in {self._limit_s:.0f} s"
            how = how if code is None else f"ended with code {code}"
            log = (self._folder / LOG).read_text(errors="replace")[-1500:]
            ended = {"status": "failed", "reason": f"{how}: {log}" if log else how}
        self._temporary.cleanup()
        return ended | {"seconds": seconds}

    def _end(self) -> None:
        """Kill its process group, and what left it for a session of its own, as vendors' tools do."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        mark = f"{_MARK}={self._folder}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot be killed
            self._process.wait(2)


class Clock(Protocol):
    """What `run` uses of `time`."""

    def monotonic(self) -> float:
        """Return the time in s."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class Stop:
    """Handles the signals that end a run: it notes the `number` of the first."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Take a signal."""
        self.number = self.number or number

    def __enter__(self) -> Stop:
        """Handle the signals, except those that are ignored, as SIGHUP is under nohup."""
        taken = [number for number in self._SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = [(number, signal.signal(number, self)) for number in taken]
        return self

    def __exit__(self, *_: object) -> None:
        """Put the handlers back."""
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

    Those that may, run beside one another, before those that run alone. Where the time cannot suffice for all that
    the checks may take, each gets its share of what is left.

    Args:
        checks: in the order of their worth.
        device: "cuda" or "cpu".
        deadline: when the last is ended, by ``clock``.
        stop: which signals came.
        note: called with the name and the result of each check, also of those that were not run.
        clock: tells the time, and waits.
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
                    left_s = math.floor(10 * max(0, limit_s)) / 10  # rounded up it may be what is needed
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
    finally:  # where a result cannot be noted, no child is left on the GPU
        for child in running:
            child.result(stopped="ended by an error")


def share_s(waiting: Sequence[Check], left_s: float, at_once: int) -> float:
    """Return how long the first of ``waiting`` may take: the last one all that is left."""
    check, *others = waiting
    if not others:
        return left_s
    needed_s = check.limit_s + sum(other.limit_s / (1 if other.alone else at_once) for other in others)
    return min(left_s, check.limit_s * min(1.0, left_s / needed_s))
