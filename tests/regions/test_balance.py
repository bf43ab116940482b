"""Ranges open and close in pairs, with their own names and lengths, however the code between them ends.

Each case is a program under the logging NVTX tool; `native.ranges` raises if a range stays open.
"""

from __future__ import annotations

import pytest

from tests.support import native
from tests.support.ranges import Range, outline

pytestmark = pytest.mark.native


def ranges(script: str, *args: str) -> list[Range]:
    return native.ranges(native.nvtx_log(script, args=args))


def test_exceptions() -> None:
    """Any exception, including KeyboardInterrupt, closes the ranges that it leaves and stays unchanged."""
    found = ranges("""
        from instrument import annotate

        @annotate("raises")
        def raises(error):
            with annotate("block"):
                raise error

        for error in (ValueError("x"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()):
            try:
                raises(error)
            except BaseException as caught:
                assert caught is error, caught
        with annotate("after"):
            pass
    """)
    assert outline(found) == "raises\n  block\n" * 4 + "after"


def test_exit_stack() -> None:
    """An ExitStack can hold regions, even one object several times, and closes them."""
    found = ranges("""
        from contextlib import ExitStack
        from instrument import annotate

        shared = annotate("shared")
        with ExitStack() as stack:
            stack.enter_context(annotate("first"))
            stack.enter_context(shared)
            with shared:
                stack.enter_context(shared)
                with annotate("inside"):
                    pass
                stack.pop_all().close()
    """)
    assert [r.name for r in found] == ["first", "shared", "shared", "shared", "inside"]
    assert {"push_pop"} == {r.kind for r in found}


def test_generators() -> None:
    """A generator's range ends when it is exhausted, closed, collected or fails; if it never runs, it has none."""
    found = ranges("""
        import gc
        from instrument import annotate

        @annotate("numbers")
        def numbers():
            with annotate("inside"):
                yield 1
                yield 2

        numbers()
        assert [1, 2] == list(numbers())
        closed, collected, failed = numbers(), numbers(), numbers()
        with annotate("outside"):  # overlaps with each of them, and is the parent of none
            assert (1, 1, 1) == (next(closed), next(collected), next(failed))
        closed.close()
        del collected
        gc.collect()
        try:
            failed.throw(ValueError())
        except ValueError:
            pass
        left = numbers()  # never exhausted: closed as the interpreter ends
        next(left)
    """)
    count = {name: sum(r.name == name for r in found) for name in ("numbers", "inside", "outside")}
    assert count == {"numbers": 5, "inside": 5, "outside": 1}
    outside = next(r for r in found if r.name == "outside")
    assert sum(outside.start < r.start < outside.end < r.end for r in found) == 6
    assert {r.name: r.kind for r in found} == {
        "numbers": "start_end",
        "inside": "start_end",
        "outside": "push_pop",
    }


def test_async_generators() -> None:
    """An async generator's range ends when it is exhausted, closed early, or left to the event loop."""
    found = ranges("""
        import asyncio
        from instrument import annotate

        @annotate("stream")
        async def stream():
            with annotate("inside"):
                for i in range(3):
                    await asyncio.sleep(0)
                    yield i

        async def main():
            assert [0, 1, 2] == [i async for i in stream()]
            closed = stream()
            async for i in closed:
                break
            await closed.aclose()
            failed = stream()
            await failed.asend(None)
            try:
                await failed.athrow(ValueError())
            except ValueError:
                pass
            left = stream()
            assert 0 == await left.asend(None)

        asyncio.run(main())
    """)
    assert "\n".join(["stream\n  inside"] * 4) == outline(found)
    assert {"start_end"} == {r.kind for r in found}


def test_cancelled_tasks() -> None:
    """Cancellation or a timeout of a task closes its ranges."""
    found = ranges("""
        import asyncio
        from instrument import annotate

        @annotate("sleeps")
        async def sleeps():
            async with annotate("block"):
                await asyncio.sleep(60)

        async def main():
            task = asyncio.create_task(sleeps())
            await asyncio.sleep(0.001)
            task.cancel()
            assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
            try:
                await asyncio.wait_for(sleeps(), 0.001)
            except asyncio.TimeoutError:
                pass

        asyncio.run(main())
    """)
    assert outline(found) == "sleeps\n  block\nsleeps\n  block"


def test_threads() -> None:
    """Threads that share one function and one object have separate stacks."""
    found = ranges("""
        import sys, threading
        from instrument import annotate

        sys.setswitchinterval(1e-5)
        shared, barrier = annotate("shared"), threading.Barrier(4)

        @annotate("work")
        def work(depth):
            with shared:
                with shared:
                    if depth:
                        work(depth - 1)

        def thread():
            barrier.wait()
            for _ in range(100):
                work(1)

        threads = [threading.Thread(target=thread) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    """)
    nested = "work\n  shared\n    shared\n      work\n        shared\n          shared"
    for thread in {r.thread for r in found}:
        assert "\n".join([nested] * 100) == outline(r for r in found if r.thread == thread)
    assert len(found) == 4 * 100 * 6


INTERLEAVED = """
    import asyncio, sys
    import nvtx
    from instrument import annotate

    async def interleave(first, second):
        # first opens, second opens, first closes, second closes
        first_open, second_open, first_closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def one():
            await first(first_open, second_open)
            first_closed.set()

        async def two():
            await first_open.wait()
            await second(second_open, first_closed)

        await asyncio.gather(one(), two())

    def block(manager):
        async def body(opened, go_on):
            with manager:
                opened.set()
                await go_on.wait()
        return body

    def async_block(manager):
        async def body(opened, go_on):
            async with manager:
                opened.set()
                await go_on.wait()
        return body

    @annotate("decorated", domain="decorated")
    async def decorated(opened, go_on):
        opened.set()
        await go_on.wait()

    shared, async_shared = annotate("shared", domain="shared"), annotate("shared", domain="async shared")

    async def main():
        first, second = nvtx.annotate("first", domain="nvtx"), nvtx.annotate("second", domain="nvtx")
        await interleave(block(first), block(second))
        await interleave(block(annotate("first", domain="own")), block(annotate("second", domain="own")))
        await interleave(block(shared), block(shared))
        await interleave(async_block(async_shared), async_block(async_shared))
        await interleave(decorated, decorated)

    asyncio.run(main())
"""


def test_interleaved_tasks() -> None:
    """Tasks that take turns on one thread get start/end ranges, which cross and keep their own lengths."""
    found = ranges(INTERLEAVED)
    pairs = {r.domain: [other for other in found if other.domain == r.domain] for r in found}
    assert {k: len(v) for k, v in pairs.items()} == {
        "nvtx": 2,
        "own": 2,
        "shared": 2,
        "async shared": 2,
        "decorated": 2,
    }

    # Push/pop as in nvtx.annotate: the first task's pop takes the second one's range, so each has the other's end.
    first, second = pairs.pop("nvtx")
    assert (first.name, second.name) == ("first", "second")
    assert first.start < second.start < second.end < first.end

    for domain, (first, second) in pairs.items():
        assert first.start < second.start < first.end < second.end, domain
        assert ("start_end", "start_end", first.thread) == (first.kind, second.kind, second.thread)
    assert [r.name for r in pairs["own"]] == ["first", "second"]


def test_interleaved_tasks_with_exit_stacks() -> None:
    """An ExitStack in a coroutine opens start/end ranges, like the coroutine's own with blocks."""
    first, second = ranges("""
        import asyncio
        from contextlib import ExitStack
        from instrument import annotate

        async def task(name, opened, go_on):
            with ExitStack() as stack:
                stack.enter_context(annotate(name))
                opened.set()
                await go_on.wait()

        async def main():
            one, two, three = asyncio.Event(), asyncio.Event(), asyncio.Event()
            first = asyncio.create_task(task("first", one, two))
            await one.wait()
            second = asyncio.create_task(task("second", two, three))
            await first
            three.set()
            await second

        asyncio.run(main())
    """)
    assert (first.name, second.name) == ("first", "second")
    assert first.start < second.start < first.end < second.end
