"""`allow_sync` and `no_syncs` apply to their block, on its thread."""

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

dry = pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU is present")


def test_innermost_block_decides() -> None:
    """The innermost block decides, and each block ends where it began, also after an exception."""
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
def test_reason_is_required(reason: Any, error: type[Exception]) -> None:
    """An empty or missing reason is refused."""
    with pytest.raises(error, match='"reason" must '):
        allow_sync(reason)
    with pytest.raises(TypeError):
        allow_sync()  # type: ignore[call-arg]


def test_decorators_without_parentheses() -> None:
    """A decorator without parentheses is refused where the function is defined, not when it is called."""
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
def test_generators_and_coroutines_are_refused(function: Any) -> None:
    """Functions whose code runs after the call, outside the block, cannot be decorated."""
    for name, decorate in (("allow_sync", allow_sync("why")), ("no_syncs", no_syncs())):
        with pytest.raises(
            TypeError, match=f"{name} decorates plain functions; inside other functions use a with block"
        ):
            decorate(function)


def test_decorated_function() -> None:
    """Each call has its own block, also a recursive one, and the function keeps its identity."""

    @allow_sync("why")
    def count(left: int, *, by: int = 1) -> list[str | None]:
        """Counts."""
        return [allow_reason()] + (count(left - by, by=by) if left else [])

    assert ["why"] * 3 == count(2, by=1)
    assert ("count", "Counts.") == (count.__name__, count.__doc__)
    assert allow_reason() is None
    method = allow_sync("partial")(functools.partial(lambda one: (one, allow_reason()), 1))
    assert (1, "partial") == method()


def test_block_entered_again() -> None:
    """The context manager can be entered again, even inside itself."""
    allowing = allow_sync("why")
    for _ in range(2):
        with allowing, allowing:
            assert "why" == allow_reason()
        assert allow_reason() is None


def test_other_threads_and_contexts() -> None:
    """A block does not apply on other threads, but does in a copied context."""
    seen: list[Any] = []
    with allow_sync("here"):
        thread = threading.Thread(target=lambda: seen.append(allow_reason()))
        thread.start()
        thread.join()
        copied = contextvars.copy_context()
    seen.append(copied.run(allow_reason))
    assert [None, "here"] == seen


def test_concurrent_tasks() -> None:
    """Two interleaved coroutines have separate blocks."""

    async def task(reason: str) -> str | None:
        with allow_sync(reason):
            await asyncio.sleep(0)
            return allow_reason()

    async def main() -> list[str | None]:
        return list(await asyncio.gather(*(task(reason) for reason in "abc")))

    assert ["a", "b", "c"] == asyncio.run(main())


@dry
def test_policy_in_a_dry_run() -> None:
    """`allow_sync` allows synchronizations inside `no_syncs`, but not around it."""

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
def test_comment_inside_no_syncs() -> None:
    """A comment allows a synchronization in any block; a line without one is forbidden."""

    @no_syncs()
    def step() -> None:
        value = torch.ones(2, device="cuda")
        value.cpu()  # instrument: allow-sync this one
        value.sum().item()

    with pytest.raises(AssertionError, match="inside no_syncs: 1"):
        dry_run(step).assert_max(9)
