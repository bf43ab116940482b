"""`allow_sync` and `no_syncs` hold on the thread and in the block of a synchronization."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from instrument import allow_sync, dry_run, no_syncs
from instrument.syncs.policy import allow_reason, forbid_syncs, syncs_forbidden

dry = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


def test_innermost() -> None:
    """The innermost block decides, and each ends where it began, also by an exception."""
    assert (None, False) == (allow_reason(), syncs_forbidden())
    with allow_sync("outer"):
        with pytest.raises(ZeroDivisionError), allow_sync("inner"):
            assert "inner" == allow_reason()
            raise ZeroDivisionError
        with forbid_syncs():
            assert (None, True) == (allow_reason(), syncs_forbidden())
            with allow_sync("again"):
                assert ("again", False) == (allow_reason(), syncs_forbidden())
            assert (None, True) == (allow_reason(), syncs_forbidden())
        assert ("outer", False) == (allow_reason(), syncs_forbidden())
    assert (None, False) == (allow_reason(), syncs_forbidden())


@pytest.mark.parametrize(
    ("reason", "error"),
    [("", ValueError), (" \n", ValueError), (None, TypeError), (3, TypeError), (print, TypeError)],
)
def test_it_must_say_why(reason: Any, error: type[Exception]) -> None:
    """An empty reason is refused, and so is a decorator without a reason."""
    with pytest.raises(error, match='"reason" must '):
        allow_sync(reason)
    with pytest.raises(TypeError):
        allow_sync()  # type: ignore[call-arg]


def test_decorators_without_brackets() -> None:
    """Without brackets both are refused where the function is defined, not when it is called."""
    with pytest.raises(TypeError, match='"reason" must be a string: <function'):

        @allow_sync  # type: ignore[arg-type]
        def step() -> None: ...

    with pytest.raises(TypeError):

        @no_syncs  # type: ignore[call-arg]
        def other() -> None: ...


def generator() -> Iterator[None]:
    yield


async def coroutine() -> None: ...


async def both() -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("function", [generator, coroutine, both, "text"])
def test_what_runs_after_the_call(function: Any) -> None:
    """Functions whose code runs after the call, outside of the block, cannot be decorated."""
    for name, decorate in (("allow_sync", allow_sync("why")), ("no_syncs", no_syncs())):
        with pytest.raises(
            TypeError, match=f"{name} decorates plain functions; inside other functions use a with block"
        ):
            decorate(function)


def test_decorated() -> None:
    """Each call has a block of its own, also a recursive one, and the function keeps its identity."""

    @allow_sync("why")
    def count(left: int, *, by: int = 1) -> list[str | None]:
        """Counts."""
        return [allow_reason()] + (count(left - by, by=by) if left else [])

    assert ["why"] * 3 == count(2, by=1)
    assert ("count", "Counts.") == (count.__name__, count.__doc__)
    assert allow_reason() is None
    method = allow_sync("partial")(functools.partial(lambda one: (one, allow_reason()), 1))
    assert (1, "partial") == method()


def test_one_block_twice() -> None:
    """The context manager can be entered again, also inside itself."""
    allowing = allow_sync("why")
    for _ in range(2):
        with allowing, allowing:
            assert "why" == allow_reason()
        assert allow_reason() is None


def test_other_threads_and_contexts() -> None:
    """A block holds on no other thread, but in a copied context."""
    seen: list[Any] = []
    with allow_sync("here"):
        thread = threading.Thread(target=lambda: seen.append(allow_reason()))
        thread.start()
        thread.join()
        copied = contextvars.copy_context()
    seen.append(copied.run(allow_reason))
    assert [None, "here"] == seen


def test_tasks_do_not_mix() -> None:
    """Two coroutines that run in turn have a block each."""

    async def task(reason: str) -> str | None:
        with allow_sync(reason):
            await asyncio.sleep(0)
            return allow_reason()

    async def main() -> list[str | None]:
        return list(await asyncio.gather(*(task(reason) for reason in "abc")))

    assert ["a", "b", "c"] == asyncio.run(main())


@dry
def test_in_a_dry_run() -> None:
    """`allow_sync` inside `no_syncs` allows synchronizations, around it does not."""

    @allow_sync("all of it")
    def step() -> None:
        value = torch.ones(2, device="cuda")
        value.cpu()
        with no_syncs():
            with allow_sync("further in"):
                value.tolist()
            value.sum().item()

    report = dry_run(step)
    assert {"cpu": "all of it", "tolist": "further in"} == {found.op: found.allowed for found in report.allowed}
    assert [("item", True)] == [(found.op, found.forbidden) for found in report.syncs]
    with pytest.raises(AssertionError, match="once inside no_syncs"):
        report.assert_max(9)


@dry
def test_a_comment_inside_of_no_syncs() -> None:
    """A comment allows synchronizations inside any block; a line without one is forbidden."""

    @no_syncs()
    def step() -> None:
        value = torch.ones(2, device="cuda")
        value.cpu()  # instrument: allow-sync this one
        value.sum().item()

    with pytest.raises(AssertionError, match="inside no_syncs: 1"):
        dry_run(step).assert_max(9)
