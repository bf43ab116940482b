"""What is written to standard error, which may be broken."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from instrument.base import stderr

from .support import programs

Pipe = tuple[int, io.TextIOWrapper]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """The end of a pipe that is read, and a buffered file that writes to it."""
    reader, writer = os.pipe()
    file = os.fdopen(writer, "w", encoding="ascii", errors="backslashreplace")
    yield reader, file
    os.close(reader)
    file.close()


def test_the_text_of_the_program_comes_first(pipe: Pipe) -> None:
    """What the program left in the buffer is written before, and all of it with the encoding of the file."""
    reader, file = pipe
    file.write("of the program\n")
    stderr.write("of the library: \u00b5s\n", file)
    assert b"of the program\nof the library: \\xb5s\n" == os.read(reader, 1000)


def test_a_pipe_that_nobody_reads() -> None:
    """The text does not stay in the buffer, so that the file can be closed."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file, pytest.raises(BrokenPipeError):
        stderr.write("of the library\n", file)


def test_another_object() -> None:
    """An object that the program put in the place of standard error gets the text."""
    file = io.StringIO()
    stderr.write("of the library\n", file)
    assert "of the library\n" == file.getvalue()


@pytest.mark.process
@pytest.mark.parametrize("format", ["quiet", "json"])
def test_a_warning_that_nobody_reads(tmp_path: Path, format: str) -> None:
    """The program ends with its own exit code."""
    code = """
import os, sys
from instrument.base import log
log.output.format = sys.argv[1]
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
log.warning("a warning")
log.last_resort("a warning")
"""
    env = {name: value for name, value in programs.environment().items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code, format], cwd=tmp_path, env=env, check=False)
    assert 0 == done.returncode


def shown(text: str, columns: int) -> list[str]:
    """Return the lines that a terminal shows; it wraps where a character follows a full line."""
    lines, at = [""], 0
    for char in text.replace("\r\n", "\n"):
        if char == "\r":
            at = 0
        elif char == "\n" or at == columns:
            lines, at = [*lines, ""], 0
        if char not in "\r\n":
            lines[-1] = lines[-1][:at].ljust(at) + char + lines[-1][at + 1 :]
            at += 1
    return [line.rstrip() for line in lines]


@pytest.mark.skipif(sys.platform != "linux", reason="sets the size of a terminal")
@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ("", ["the summary", ""]),
        ("epoch 1\n", ["epoch 1", "the summary", ""]),
        (".", [".", "the summary", ""]),
        (" 50%|####   |", [" 50%|####   |", "the summary", ""]),
        ("#" * 20, ["#" * 20, "the summary", ""]),
        ("a bar\r", ["the summary", ""]),
    ],
)
def test_text_below_a_progress_bar(before: str, lines: list[str]) -> None:
    """At a terminal, lines begin below what the program left on the current one, and not below an empty one."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with os.fdopen(writer, "w") as file:
        file.write(before)
        stderr.write(f"{stderr.fresh_line(file)}the summary\n", file)
        text = ""
        while "the summary" not in text:  # a terminal may hand over each line by itself
            text += os.read(reader, 1000).decode()
        assert lines == shown(text, 20)
    os.close(reader)
    assert stderr.fresh_line(io.StringIO()) == ""
