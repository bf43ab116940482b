"""Regions in torch.profiler's traces, with NVTX as well, and across the end of a recording."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from instrument import annotate
from tests.conftest import annotations
from tests.support import native, warm
from tests.support.programs import environment, program, python
from tests.support.ranges import outline

pytestmark = pytest.mark.process


def test_regions_are_user_annotations(
    recorded: Callable[..., list[dict[str, Any]]],
) -> None:
    """A plain torch.profiler block shows regions as it shows record_function."""

    def work() -> None:
        with annotate("region"):
            torch.ones(1)

    (region,) = recorded(work)
    assert region["name"] == "region"
    assert [event["name"] for event in recorded(work, "cpu_op")] == ["aten::ones", "aten::empty", "aten::fill_"]


def test_interleaved_tasks_cross(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """Two interleaved tasks each keep their own name and length."""

    async def task(name: str, opened: asyncio.Event, go_on: asyncio.Event) -> None:
        with annotate(name):
            opened.set()
            await go_on.wait()

    async def main() -> None:
        one, two, three = asyncio.Event(), asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(task("first", one, two))
        await one.wait()
        second = asyncio.create_task(task("second", two, three))
        await first
        three.set()
        await second

    first, second = recorded(lambda: asyncio.run(main()))
    assert [first["name"], second["name"]] == ["first", "second"]
    assert first["ts"] < second["ts"] < first["ts"] + first["dur"] < second["ts"] + second["dur"]


@pytest.mark.parametrize("nested", [False, True])
def test_regions_that_outlive_their_recording(tmp_path: Path, nested: bool) -> None:
    """Regions open when a recording stops show in its trace; ending or freeing them in the next one is safe.

    `torch.profiler.record_function` crashes: 50 rounds of 200 open ranges corrupt the heap.
    """
    script = """
        import gc, sys
        import torch
        from torch.profiler import ProfilerActivity, profile
        from instrument.base.compat import profilers
        from instrument import annotate

        if sys.argv[3] == "True":  # as when recording a GPU
            profilers.needs_nested_ranges = lambda profiler: True

        def recording():
            return profile(activities=[ProfilerActivity.CPU])

        def ended(opened):
            while opened:
                opened.pop().__exit__(None, None, None)

        def lost(opened):
            opened.clear()
            gc.collect()

        for how in (ended, lost) * 25:
            with recording() as first:
                opened = [annotate(f"region {i}").__enter__() for i in range(100)]
                try:  # torch refuses a second profiler, which has no effect
                    torch.autograd.profiler.emit_itt().__enter__()
                except RuntimeError:
                    pass
                opened += [annotate(f"region {i}").__enter__() for i in range(100, 200)]
            with recording() as second:
                how(opened)
                torch.ones(1)
        first.export_chrome_trace(sys.argv[1])
        second.export_chrome_trace(sys.argv[2])
    """
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    warm.run(python(program(script, tmp_path), [str(first), str(second), str(nested)]), environment(), check=True)
    assert sorted(f"region {i}" for i in range(200)) == sorted(event["name"] for event in annotations(first))
    assert annotations(second) == []


@pytest.mark.native
def test_nvtx_and_torch_imported_later(tmp_path: Path) -> None:
    """Each region shows once in both, even if torch is imported later or a window opens inside a region."""
    script = """
        import sys
        from instrument import annotate

        @annotate("early")
        def early():
            pass

        with annotate("before"):
            early()
        assert "torch" not in sys.modules
        from torch.profiler import ProfilerActivity, profile

        prof, across = profile(activities=[ProfilerActivity.CPU]), annotate("across")
        with annotate("around"):
            prof.start()
            with annotate("block"):
                early()
                early()
            with across:
                prof.stop()
                early()
        prof.export_chrome_trace(sys.argv[1])
        early()
    """
    trace = tmp_path / "trace.json"
    found = native.ranges(native.nvtx_log(script, args=[str(trace)]))
    assert outline(found) == "before\n  early\naround\n  block\n    early\n    early\n  across\n    early\nearly"
    assert Counter(event["name"] for event in annotations(trace)) == {"block": 1, "early": 2, "across": 1}
