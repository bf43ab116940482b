"""Regions as rocTX ranges, received by stand-ins for AMD's libraries."""

from __future__ import annotations

import ctypes
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support import native
from tests.support.programs import environment, program, python, run
from tests.support.ranges import outline

pytestmark = pytest.mark.native

UNDER_ROCPROF = {"ROCP_TOOL_LIBRARIES": "librocprofiler-sdk-tool.so"}
PROGRAM = """
    import asyncio
    from instrument import annotate, mark

    @annotate("inner")
    def inner():
        mark("instant")

    @annotate("task")
    async def task():
        await asyncio.sleep(0)

    async def main():
        await asyncio.gather(task(), task())

    with annotate("outer \\u00e9", color="red", domain="d", category="c", payload=1):
        inner()
    asyncio.run(main())
"""
OLD, NEW = "libroctx64.so.4", "librocprofiler-sdk-roctx.so.1"


@pytest.mark.parametrize("called, options", [
    (OLD, {"libraries": [OLD]}),
    (NEW, {"libraries": [NEW]}),
    (NEW, {"libraries": [OLD, NEW]}),
    ("librocprofiler-sdk-roctx.so", {"libraries": ["librocprofiler-sdk-roctx.so", "libroctx64.so"]}),
    ("preload", {"libraries": [OLD, NEW], "how": "preload"}),
])  # fmt: skip
def test_choice_of_the_library(called: str, options: dict[str, Any]) -> None:
    """A library of the profiler in the process is used first, then rocprofiler-sdk, then roctracer."""
    events = native.roctx_log(PROGRAM, env=UNDER_ROCPROF, **options)
    assert {called} == {event["library"] for event in events}
    assert [event["op"] for event in events] == [
        "push",
        "push",
        "mark",
        "pop",
        "pop",
        "start",
        "start",
        "end",
        "end",
    ]
    found = native.ranges(events)
    assert outline(r for r in found if r.kind == "push_pop") == "outer é\n  inner"
    assert [r.name for r in found if r.kind == "start_end"] == ["task", "task"]
    assert [r.name for r in native.marks(events)] == ["instant"]


def test_without_rocprof() -> None:
    """A library that is installed but not loaded is not used."""
    assert native.roctx_log(PROGRAM) == []


def test_missing_library(tmp_path: Path) -> None:
    """Without a rocTX library, the program continues, and the log says once what to install."""
    done = run(python(program(PROGRAM, tmp_path)), environment(UNDER_ROCPROF))
    if not done.stderr:
        pytest.skip("this machine has a rocTX library")
    assert len(done.stderr.splitlines()) == 1
    assert "no rocTX library found: install rocprofiler-sdk or roctracer (ROCm)" in done.stderr


REAL = """
    import ctypes
    operations = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
    def callback(domain, operation, data):
        operations.append(operation)
        return 0

    ctypes.CDLL("libroctx64.so.4").roctxRegisterTracerCallback(callback)
    exec(open({program!r}).read())
    print(operations)
"""
MARK, PUSH, POP, START, STOP = range(5)


def test_real_library(tmp_path: Path) -> None:
    """AMD's own library, as packaged by Debian, accepts all calls and passes them to its tool hook."""
    try:
        ctypes.CDLL(OLD)
    except OSError:
        pytest.skip(f"{OLD} is not installed: Debian's package libroctx64-4 has it")
    inner = tmp_path / "regions.py"
    inner.write_text(textwrap.dedent(PROGRAM))
    source = textwrap.dedent(REAL).format(program=str(inner))
    done = run(python(program(source, tmp_path)), environment(UNDER_ROCPROF))
    assert done.stdout == f"{[PUSH, PUSH, MARK, POP, POP, START, START, STOP, STOP]}\n"
