"""SIGTERM in a program under `instrument run`."""

from __future__ import annotations

import signal
import time
from concurrent.futures import TimeoutError  # another one before Python 3.11
from pathlib import Path

import pytest

from tests.bootstrap.programs import RUN, TRAIN, entries_in, write
from tests.bootstrap.programs import run_warm as run
from tests.support import warm
from tests.support.programs import environment

pytestmark = pytest.mark.process

SIGTERM = (
    TRAIN.replace("range(5)", "range(10**9)")
    + """
    if _ == 4:
        print("ready", flush=True)
    {body}
"""
)


@pytest.mark.parametrize(
    ("handler", "code"),
    [("", -signal.SIGTERM), ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))", 3)],
)
def test_sigterm(tmp_path: Path, handler: str, code: int) -> None:
    """An open window is saved and the process ends by the signal; the program's own handler is kept."""
    write(tmp_path, f"import signal, sys\n{handler}\n" + SIGTERM.format(body="pass"))
    command = [*RUN, "--steps", "2-1000000000", "--", "train.py"]
    with warm.started(command, environment(), cwd=tmp_path) as program:
        program.readline()
        program.send_signal(signal.SIGTERM)
        done = program.wait()
    assert done.returncode == code
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert entry["status"] == "partial"
    assert entry["files"]
    assert "Where the step went" in done.stderr
    if not handler:
        assert "SIGTERM ended the program" in entry["reason"]
        assert "SIGTERM ended the program." in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "waiting", ["thread.join()", "time.sleep(600)", "selectors.DefaultSelector().select(600)"]
)
def test_sigterm_while_another_thread_records(tmp_path: Path, waiting: str) -> None:
    """The process ends by the signal, and the line of the window says why it has no files."""
    installed = "while _ == 0 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL: time.sleep(0.01)"
    body = SIGTERM.format(body=installed).replace("\n", "\n    ")
    text = f"""
import selectors, signal, threading, time
def train():
    {body}
thread = threading.Thread(target=train, daemon=True)
thread.start()
{waiting}
"""
    write(tmp_path, text)
    command = [*RUN, "--steps", "2-1000000000", "--", "train.py"]
    with warm.started(command, environment(), cwd=tmp_path) as program:
        program.readline()
        program.send_signal(signal.SIGTERM)
        done = program.wait()
    assert done.returncode == -signal.SIGTERM
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert entry["status"] == "skipped"
    assert "on another thread" in entry["reason"]


def test_second_sigterm(tmp_path: Path) -> None:
    """A second signal ends the process at once, even if Python can run no handler."""
    stuck = """
import ctypes
def stuck():
    mutex = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    libc.pthread_mutex_lock(mutex)
"""
    write(tmp_path, stuck + SIGTERM.format(body="if _ == 4: stuck()"))
    command = [*RUN, "--steps", "2-1000000000", "--", "train.py"]
    with warm.started(command, environment(), cwd=tmp_path) as program:
        assert [program.readline() for _ in range(2)] == ["ready\n", "stuck\n"]
        time.sleep(0.5)
        program.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            program.wait(timeout=1)
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=60).returncode == -signal.SIGTERM


@pytest.mark.parametrize("ending", ["SyncError('on purpose')", "ZeroDivisionError('on purpose')"])
def test_sigterm_with_failing_save(tmp_path: Path, ending: str) -> None:
    """The process still ends by the signal."""
    patch = f"""
import instrument.integrations.loop
from instrument.base.errors import SyncError
def stop(*_, **__):
    raise {ending}
instrument.integrations.loop.Loop.stop = stop
"""
    body = "if _ == 5:\n        import signal; signal.raise_signal(signal.SIGTERM)"
    write(tmp_path, patch + SIGTERM.format(body=body))
    done = run(tmp_path, [*RUN, "--steps", "2-1000000000", "--", "train.py"], INSTRUMENT_STRICT="1")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "ready\n")


def test_sigterm_after_the_last_window(tmp_path: Path) -> None:
    """The handler and the wakeup descriptor exist only while windows remain."""
    text = """
    import signal, threading
    wakeup = signal.set_wakeup_fd(-1)
    if wakeup != -1:
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    threads = sum(thread.name == "instrument-sigterm" for thread in threading.enumerate())
    print(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, wakeup != -1, threads if _ < 2 else "")
"""
    write(tmp_path, TRAIN + text)
    for options in (["--steps", "2"], ["--profiler", "none"]):
        done = run(tmp_path, [*RUN, *options, "--", "train.py"])
        ahead = ["False", "False", "0"] if "none" in options else ["True", "True", "1"]
        window = [*2 * [ahead], *3 * [["False", "False"]]]
        assert [line.split() for line in done.stdout.splitlines()] == window


@pytest.mark.parametrize("when", ["before", "after"])
def test_faulthandler_stays(tmp_path: Path, when: str) -> None:
    """A handler that `faulthandler` sets in C is kept: SIGTERM prints the stacks, and the program continues."""
    register = "import faulthandler, os, signal; faulthandler.register(15, chain=False, all_threads=False)"
    sent = "\n    if _ in (3, 4): import os, signal; os.kill(os.getpid(), signal.SIGTERM)\nprint('end')"
    before, after = (register, "") if when == "before" else ("", f"\n    if _ == 1: {register}")
    write(tmp_path, f"{before}\n{TRAIN}{after}{sent}")
    done = run(tmp_path, [*RUN, "--steps", "2", "--", "train.py"])
    assert (done.returncode, done.stdout, done.stderr.count("most recent call first")) == (0, "end\n", 2)


@pytest.mark.parametrize("times", [1, 2])
def test_handler_set_later(tmp_path: Path, times: int) -> None:
    """A handler that the program sets later receives the signals, even while windows remain."""
    text = f"""
    import os, signal, time
    import instrument.start.bootstrap.termination as termination
    termination._GRACE_S = 0.1
    if _ == 1:
        signal.signal(signal.SIGTERM, lambda *_: print("saved"))
    if _ in (2, 3)[:{times}]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
print("end")
"""
    write(tmp_path, TRAIN + text)
    done = run(tmp_path, [*RUN, "--steps", "0,100", "--", "train.py"])
    assert (done.returncode, done.stdout) == (0, times * "saved\n" + "end\n")


@pytest.mark.parametrize("last", [64, 1024])
def test_program_that_closes_all_files(tmp_path: Path, last: int) -> None:
    """Files that the program opens later under the same descriptors are neither written to nor closed."""
    body = f"""
    if _ == 0:
        import os, signal, sys
        os.closerange(3, {last})
        files = [open(f"log{{number}}", "wb", buffering=0) for number in range(300)]
        signal.signal(signal.SIGUSR1, lambda *_: print("signal"))
    if _ == 2:
        os.kill(os.getpid(), signal.SIGUSR1)
    for file in files:
        file.write(b"step\\n")
for file in files:
    file.write(b"end\\n")
assert all(os.path.getsize(file.name) == 29 for file in files)
"""
    write(tmp_path, TRAIN + body)
    done = run(tmp_path, [*RUN, "--steps", "1", "--", "train.py"])
    assert (done.returncode, done.stdout) == (0, "signal\n"), done.stderr
    assert entries_in(tmp_path / "runs/instrument")[0]["files"]


def test_sigterm_in_a_forked_child(tmp_path: Path) -> None:
    """A forked child ends by the signal as usual, and has nothing of the library."""
    write(
        tmp_path,
        TRAIN
        + """
    if _ == 3:
        import os, signal
        child = os.fork()
        if not child:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os._exit(7)
        assert os.waitpid(child, 0)[1] == 7 << 8
""",
    )
    assert run(tmp_path, [*RUN, "--steps", "100", "--", "train.py"]).returncode == 0
