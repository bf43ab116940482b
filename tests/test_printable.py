"""Untrusted text is escaped before it reaches a terminal."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from instrument.base import log
from instrument.base.errors import TraceError
from instrument.base.printable import printable, shell_line

HOSTILE = "\x1b]0;owned\x07\x9b31m\u202egnp\u2066\nrm"
SHOWN = r"\x1b]0;owned\x07\x9b31m\u202egnp\u2066\nrm"


@given(st.text())
@example(HOSTILE)
def test_all_text(text: str) -> None:
    """The result is one line of printable characters; printable text is returned unchanged."""
    shown = printable(text)
    assert all(unicodedata.category(char)[0] not in "CZ" or char == " " for char in shown)
    assert printable(shown) == shown
    shown.encode()


def test_escapes() -> None:
    """Escape sequences, C1 and bidirectional controls and line breaks are escaped; spaces are kept."""
    assert printable(HOSTILE) == SHOWN
    assert printable("a\u00a0b\u2003é\u2028") == r"a b é\u2028"


def test_log_and_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Log lines and error texts are escaped for a terminal; the error object keeps the original path."""
    with caplog.at_level(logging.INFO, "instrument"):
        log.warning("not recorded", reason=HOSTILE)
    assert caplog.messages == [f"instrument: not recorded (reason={SHOWN})"]
    error = TraceError(Path(HOSTILE), HOSTILE)
    assert str(error) == f"cannot read {SHOWN}: {SHOWN}"
    assert error.path == Path(HOSTILE)


def test_lines_to_be_copied() -> None:
    """A shell parses the quoted text back into the original words."""
    words = ["a b", "it's", "\x1b[31m'\\n", "\n"]
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs Bash")
    line = shell_line(words)
    assert line.isprintable()
    shell = subprocess.run([bash, "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    assert shell.stdout.split("\0")[:-1] == words


def test_commands(tmp_path: Path) -> None:
    """Commands escape the names of files and folders and the content of files."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    data = Path(__file__).parent / "data" / "gpu_two_steps.json"
    for name in (f"rank0{HOSTILE}.json", f"rank1{HOSTILE}.json"):
        (folder / name).write_text(data.read_text())
    (folder / f"rank2{HOSTILE}.json").write_text("hello" + "x" * 100_000)
    good, bad = str(folder / f"rank0{HOSTILE}.json"), str(folder / f"rank2{HOSTILE}.json")
    for arguments in (
        ["summarize", str(folder), good, bad],
        ["syncs", good, good],
        ["run", "--print-command", good],
    ):
        command = [sys.executable, "-m", "instrument", *arguments]
        done = subprocess.run(command, capture_output=True, timeout=120, cwd=tmp_path)
        output = (done.stdout + done.stderr).decode()
        assert SHOWN in output, output
        assert not {char for char in output if not char.isprintable()} - {"\n"}
