"""A daemon of Kineto, such as dynolog, gets a trace with the rank from a program that runs under `profile`."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ..support import programs

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="Kineto's daemon is for Linux"),
]

PROGRAM = """
    import os, sys, time, torch, instrument

    end = time.monotonic() + 60
    with instrument.profile(sys.argv[1], schedule="1000000") as prof:
        open(sys.argv[3], "w").close()
        while time.monotonic() < end and not os.path.exists(sys.argv[2]):
            torch.ones(10).sum()
            time.sleep(0.005)
            prof.step()
    time.sleep(1)  # Kineto's thread may not be done
"""


class Daemon:
    """A stand-in for dynolog: answers the requests of Kineto, each a header of 40 bytes and its content.

    Attributes:
        config: the answer to the next request for a configuration; empty after it.
    """

    def __init__(self) -> None:
        self.config = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(0.2)
        self._socket.bind(b"\0dynolog\0")

    def answer(self) -> None:
        """Answer one request, if one comes soon."""
        try:
            data, sender = self._socket.recvfrom(1 << 16)
        except TimeoutError:
            return
        _, kind = struct.unpack_from("Q32s", data)
        content = struct.pack("i", 1)
        if kind.rstrip(b"\0") == b"req":
            content, self.config = self.config.encode(), ""
        self._socket.sendto(struct.pack("Q32s", len(content), kind) + content, sender)

    def close(self) -> None:
        self._socket.close()


@pytest.mark.skipif(
    not hasattr(torch.autograd, "_add_metadata_json"), reason="this version of torch takes no metadata"
)
def test_the_rank_is_in_the_trace(tmp_path: Path) -> None:
    """The trace that the daemon asks for has the rank and the world size of the environment."""
    wanted = tmp_path / "trace.json"
    done, begun = tmp_path / "done", tmp_path / "begun"
    config = f"ACTIVITIES_LOG_FILE={wanted}\nPROFILE_START_TIME=0\nACTIVITIES_DURATION_MSECS=200\n"
    daemon = Daemon()
    variables = {"KINETO_USE_DAEMON": "1", "RANK": "3", "WORLD_SIZE": "8"}
    arguments = [str(path) for path in (tmp_path / "out", done, begun)]
    command = programs.python(programs.program(PROGRAM, tmp_path), arguments)
    with subprocess.Popen(list(map(str, command)), env=programs.environment(variables)) as program:
        try:
            end = time.monotonic() + 60
            while program.poll() is None and time.monotonic() < end and not list(tmp_path.glob("trace_*.json")):
                if config and begun.exists():
                    daemon.config, config = config, ""
                daemon.answer()
            done.touch()
            assert 0 == program.wait(60)
        finally:
            program.kill()
            daemon.close()
    (trace,) = tmp_path.glob("trace_*.json")
    assert {"backend": "none", "rank": 3, "world_size": 8} == json.loads(trace.read_text())["distributedInfo"]
