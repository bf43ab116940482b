"""Tests of the runner of programs that other tests use."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from .support.programs import NSYS_FAILED, ToolFailed, environment, program, python, run

LEAVE_CHILD = """
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    sys.stdout.reconfigure(errors="surrogateescape")
    print(child.pid, "\\udcff\\r", flush=True)
    print("warned", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="signals a process")
def test_a_program_that_leaves_a_process_with_its_output(tmp_path: Path) -> None:
    """The output is complete when the program ends, while the process lives on."""
    done = run(python(program(LEAVE_CHILD, tmp_path), ["3"]), environment(), check=False, timeout=30)
    os.kill(int(done.stdout.split()[0]), signal.SIGKILL)  # raises if the process is gone
    assert (3, "warned\n") == (done.returncode, done.stderr)
    assert done.stdout.endswith(" \\xff\n")


def test_a_program_that_fails(tmp_path: Path) -> None:
    """The error shows the exit code and both outputs of the program."""
    with pytest.raises(AssertionError, match="ended with 4\nstdout:\nout\n\nstderr:\nerr\n"):
        run(python(program("import sys; print('out'); print('err', file=sys.stderr); sys.exit(4)", tmp_path)),
            environment())  # fmt: skip


@pytest.mark.parametrize("text", NSYS_FAILED)
def test_a_failure_of_nsys_itself(text: str) -> None:
    """Such a failure has its own error, so that the test records again."""
    with pytest.raises(ToolFailed, match=text):
        run(["sh", "-c", f"echo '{text}' >&2; exit 1"], environment())
