"""A job that is killed in mid-window leaves whole files or none, and a manifest that is true."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from instrument.base import process_id, run_folder
from instrument.base.run_folder import entries_of, files_of
from instrument.finish import main as finishing
from instrument.record.handover.storage import Storage

from ..support import programs, warm
from ..support.finishing import eventually, processes
from .training import content, manifest, run, statuses

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

ENDLESS = """
    import os, time, torch, instrument

    with instrument.profile("out", schedule=instrument.schedule(active=2, repeat=0)) as prof:
        while True:
            for _ in range(20_000 if prof.step_num > 3 else 10):
                torch.ones(3).sum()
            while prof.step_num == 4 and not os.path.exists("out/manifest.jsonl"):
                time.sleep(0.01)  # the finishing process has begun: it removes no part of this window
            prof.step()
"""


def parts(out: Path) -> list[Path]:
    """Return the temporary files."""
    return [path for path in out.glob("window-*/.*.part*") if path.is_file()]


def test_a_job_that_is_killed_while_it_writes_a_trace(tmp_path: Path) -> None:
    """All that has a name is whole, all that the manifest names is there; the next run removes the rest."""
    out = tmp_path / "out"
    command = programs.python(programs.program(ENDLESS, tmp_path))
    with warm.started(command, programs.environment({"INSTRUMENT_SUMMARY": "0"}), cwd=tmp_path) as job:
        eventually(lambda: bool(list(out.glob("window-0003/.*.json.[!g]*"))), every_s=0.002)
        job.send_signal(signal.SIGKILL)
        assert -signal.SIGKILL == job.wait().returncode
    eventually(lambda: not processes(job.pid))
    assert ["window-0003"] == [path.parent.name for path in parts(out)]
    for path in out.glob("window-*/[!.]*"):
        assert content(path)["traceEvents"]
    assert [(1, "recorded"), (2, "recorded")] == statuses(manifest(out))[:2]
    assert all((out / name).is_file() for entry in manifest(out) for name in files_of(entry))
    run(out)
    assert [] == parts(out)


@pytest.mark.parametrize("step", [1, 4], ids=["first window", "second window"])
def test_a_job_that_is_killed_in_a_window(tmp_path: Path, step: int) -> None:
    """Readers meet the line of the window that was open; the next run writes it into the manifest."""
    out = tmp_path / "out"
    killing = f"""
        import os, signal, torch, instrument

        with instrument.profile("out", schedule=instrument.schedule(active=3, repeat=0)) as prof:
            while True:
                torch.ones(3).sum()
                if prof.step_num == {step}:
                    os.kill(os.getpid(), signal.SIGKILL)
                prof.step()
    """
    command = programs.python(programs.program(killing, tmp_path))
    with warm.started(command, programs.environment({"INSTRUMENT_SUMMARY": "0"}), cwd=tmp_path) as job:
        assert -signal.SIGKILL == job.wait().returncode
    eventually(lambda: not processes(job.pid))
    number = 1 + step // 3
    planned = [number * 3 - 3, number * 3 - 1]
    (killed,) = [entry for entry in entries_of(out) if entry["window"] == number]
    assert ("failed", planned) == (killed["status"], killed["planned_steps"])
    assert "SIGKILL" in killed["reason"]
    run(out)
    assert [killed] == [entry for entry in manifest(out) if entry["status"] == "failed"]
    assert [] == list(out.glob(".*.open.json"))


def test_a_window_that_is_not_finished_when_another_process_begins(tmp_path: Path) -> None:
    """The jobs of a killed process stay until they are done, though others record into the folder."""
    out = tmp_path / "out"
    killing = f"""
        import os, signal, sys, torch, instrument
        sys.path.append({str(programs.ROOT)!r})
        from tests.support.finishing import finishing_pid

        with instrument.profile("out", schedule="0,5") as prof:
            for step in range(4):
                torch.ones(3).sum()
                prof.step()
                if step == 0:
                    os.kill(finishing_pid(os.getpid()), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = programs.python(programs.program(killing, tmp_path))
    with warm.started(command, programs.environment({"INSTRUMENT_SUMMARY": "0"}), cwd=tmp_path) as job:
        assert -signal.SIGKILL == job.wait().returncode
    (stopped,) = [number for number, line in processes(job.pid).items() if line[0] != "/bin/sh"]
    run(out)
    assert 1 == len(list(out.glob(".*.jobs")))
    os.kill(stopped, signal.SIGCONT)
    eventually(lambda: not processes(job.pid))
    assert [(1, "recorded")] * 2 == statuses(manifest(out))[:1] + statuses(manifest(out))[-1:]
    assert [] == list(out.glob(".*.jobs"))


def test_two_finishing_processes_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window that was open is written once, also if the process of another rank takes one meanwhile."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as exited:
        left = exited.pid
    for window in (1, 2):
        name = f".{process_id.place()}-{left}-1-{window:08x}.open.json"
        (tmp_path / name).write_text(json.dumps({"window": window}))

    def killed_beside_another(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
        first, second = run_folder.killed(folder)
        first[0].unlink()  # the other process was faster
        yield from (first, second)

    monkeypatch.setattr(finishing, "killed", killed_beside_another)
    jobs = finishing.FinishingJobs()
    storage = asdict(Storage())
    jobs.do({"kind": "start", "job": 0, "state": None, "folder": str(tmp_path), "run": "r", "storage": storage})
    jobs.account_for_killed()
    assert [] == jobs.do({"kind": "end", "job": 1})["errors"]
    assert [2] == [entry["window"] for entry in manifest(tmp_path)]
    assert [] == list(tmp_path.glob(".*.open.json"))


def test_a_reader_of_the_manifest_of_a_running_job(out: Path) -> None:
    """Each line that a reader sees while windows are written is whole, and its files are there."""
    seen: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            text = (out / "manifest.jsonl").read_bytes() if out.is_dir() and list(out.glob("manifest*")) else b""
            entries = list(entries_of(out))
            assert len(entries) >= text.count(b"\n")
            assert all((out / name).is_file() for entry in entries for name in files_of(entry))
            seen.append(len(entries))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        run(out)
        run(out)
    finally:
        over.set()
        reader.join()
    assert seen == sorted(seen)
    assert 4 == len(manifest(out))


def test_the_modes_of_all_files_respect_the_umask(out: Path) -> None:
    """Folders, traces and the manifest are as open as the program's own files."""
    before = os.umask(0o027)
    try:
        run(out)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    folders = {path.stat().st_mode & 0o777 for path in (out, *out.glob("window-*"))}
    assert ({0o640}, {0o750}) == (modes, folders)
