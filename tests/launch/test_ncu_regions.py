"""The launches that a region contains under ncu, by a stub with ncu's rules for ranges and threads."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import native
from tests.support.programs import environment, run

pytestmark = [pytest.mark.vendor, pytest.mark.native]

# Marks stand for kernel launches, and a thread of the program for autograd's thread.
PROGRAM = """
import threading
import instrument

def launch():
    instrument.mark("kernel")

launch()
with instrument.annotate("backward"):
    launch()
    thread = threading.Thread(target=lambda: [launch() for _ in range(3)])
    thread.start()
    thread.join()
launch()
"""
NCU = """#!{python}
import json, os, pathlib, subprocess, sys

words = sys.argv[1:]
if words == ["--version"]:
    print("Version 2025.3.0")
elif words == ["--help"]:
    print({help!r})
else:
    pathlib.Path({folder!r}, "words.json").write_text(json.dumps(words))
    program = words[words.index("-o") + 2 :]
    sys.exit(subprocess.run(program, env={{**os.environ, **{tool!r}}}).returncode)
"""


@pytest.mark.parametrize("help", ["--nvtx\n--nvtx-push-pop-scope arg (=thread)", "--nvtx"])
def test_launches_of_every_thread_are_in_the_region(tmp_path: Path, help: str) -> None:
    """The region has all four launches of the backward pass, whether or not this ncu has the scope."""
    tool = {
        "NVTX_INJECTION64_PATH": str(native.build("nvtxlog")),
        "NVTXLOG": str(tmp_path / "log.jsonl"),
        "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "/opt/ncu",
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    text = NCU.format(python=sys.executable, help=help, folder=str(tmp_path), tool=tool)
    (folder / "ncu").write_text(text)
    (folder / "ncu").chmod(0o755)
    (tmp_path / "program.py").write_text(PROGRAM)
    env = environment()
    env["PATH"] = f"{folder}{os.pathsep}{env['PATH']}"
    command = [sys.executable, "-m", "instrument", "run", "--profiler", "ncu", "--region", "backward"]
    run([*command, "--steps", "all", "--out", tmp_path / "out", "--", tmp_path / "program.py"], env)
    process = "--nvtx-push-pop-scope" in json.loads((tmp_path / "words.json").read_text())
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (backward,) = (each for each in native.ranges(events) if each.name == "backward")
    in_region = [
        mark
        for mark in native.marks(events)
        if backward.start <= mark.start <= backward.end
        and (process or backward.kind == "start_end" or backward.thread == mark.thread)
    ]
    assert 4 == len(in_region)
    assert ("push_pop" if process else "start_end") == backward.kind
