"""Regions as ITT tasks, received by a collector that replaces VTune's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support import native
from tests.support.programs import environment, program, python, run
from tests.support.ranges import outline

pytestmark = pytest.mark.native
pytest.importorskip("ittapi")

PROGRAM = """
    import asyncio
    from instrument import annotate, mark

    @annotate("inner")
    def inner():
        mark("instant")

    @annotate("task")
    async def task(opened, go_on):
        opened.set()
        await go_on.wait()

    async def main():
        one, two = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(task(one, two))
        await one.wait()
        second = asyncio.create_task(task(two, three := asyncio.Event()))
        await first
        three.set()
        await second

    with annotate("outer", color="red", category="c", payload=1):
        inner()
        with annotate("fetch", domain="loader"):
            pass
    asyncio.run(main())
"""


def test_tasks() -> None:
    """Regions are nested tasks in their domain; in code that can be suspended they are overlapped tasks."""
    found = native.ranges(native.itt_log(PROGRAM))
    assert outline(found) == "outer\n  inner\n    instant\nfetch\ntask\ntask"
    assert {r.name: r.domain for r in found} == {
        "outer": "instrument",
        "inner": "instrument",
        "instant": "instrument",
        "fetch": "loader",
        "task": "instrument",
    }
    first, second = [r for r in found if r.name == "task"]
    assert first.start < second.start < first.end < second.end
    assert {"start_end"} == {first.kind, second.kind}
    assert {"push_pop"} == {r.kind for r in found if r.name != "task"}


@pytest.mark.parametrize("elsewhere", ["", "thread"], ids=["here", "first region on another thread"])
def test_emit_itt_shows_no_region_twice(elsewhere: str) -> None:
    """Torch's emit_itt emits tasks of operators; regions are not emitted a second time."""
    script = """
        import sys, threading
        import torch
        from torch.autograd.profiler import emit_itt
        from instrument import annotate

        @annotate("work")
        def work():
            torch.ones(1)

        with emit_itt():
            if "thread" in sys.argv:
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
            work()
            with annotate("block"):
                work()
        work()
    """
    found = native.ranges(native.itt_log(script, args=[elsewhere]))
    count = Counter((r.domain, r.name) for r in found)
    assert {"work": 4 if elsewhere else 3, "block": 1} == {
        n: c for (domain, n), c in count.items() if domain == "instrument"
    }
    assert count["PyTorch", "aten::ones"] == 2
    assert [n for domain, n in count if domain == "PyTorch" and n in ("work", "block")] == []


def test_missing_ittapi(tmp_path: Path) -> None:
    """Without ittapi, the program continues, and the log says once what to install."""
    script = """
        import sys
        sys.modules["ittapi"] = None
        from instrument import annotate

        with annotate("x"), annotate("y"):
            print("done")
    """
    done = run(python(program(script, tmp_path)), environment({"INTEL_LIBITTNOTIFY64": "collector.so"}))
    assert done.stdout == "done\n"
    assert len(done.stderr.splitlines()) == 1
    assert "ittapi is missing: pip install ittapi" in done.stderr
