"""Several patches of one attribute can be undone in any order."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from instrument.base import patch
from instrument.base.patch import Patch, undo


def around(name: str) -> Callable[[Any], Any]:
    return lambda original: lambda: f"{name}({original()})"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def apply_patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    patch = Patch(owner, name, make)
    patch.apply()
    return patch


class Owner:
    @staticmethod
    def call() -> str:
        return "original"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_undone_in_any_order(order: tuple[int, ...]) -> None:
    """Undoing the last patch restores the original object and keeps no record of it."""
    owner = SimpleNamespace(call=Owner.call)
    patches = [apply_patch(owner, "call", around(name)) for name in "abc"]
    assert owner.call() == "c(b(a(original)))"
    for number in order:
        assert owner.call is not Owner.call
        patches[number].undo()
    assert owner.call is Owner.call
    assert (id(owner), "call") not in patch._tops


def test_patched_and_undone_repeatedly() -> None:
    """A patch that is applied and undone repeatedly over or under another one does not accumulate."""
    owner = SimpleNamespace(call=Owner.call)
    for _ in range(3):
        lower = apply_patch(owner, "call", around("lower"))
        upper = apply_patch(owner, "call", around("upper"))
        lower.undo()
        lower.undo()
        assert owner.call() == "upper(lower(original))"  # the lower replacement stays and passes calls on
        upper.undo()
        assert owner.call is Owner.call


def test_under_a_foreign_replacement() -> None:
    """An attribute that other code sets over a patch stays, and undoing a later patch restores it."""
    owner = SimpleNamespace(call=Owner.call)
    first = apply_patch(owner, "call", around("first"))
    foreign = owner.call = around("foreign")(owner.call)
    first.undo()
    assert owner.call is foreign
    second = apply_patch(owner, "call", around("second"))
    assert owner.call() == "second(foreign(first(original)))"
    second.undo()
    assert owner.call is foreign


def test_an_attribute_that_did_not_exist() -> None:
    """An attribute that did not exist is deleted again, on an instance and on a class."""
    owner = SimpleNamespace()
    kind = type("Kind", (Owner,), {})
    patches = [apply_patch(place, "call", lambda original: lambda: original) for place in (owner, kind)]
    assert owner.call() is None
    assert "call" in vars(kind)
    for applied in patches:
        applied.undo()
    assert not hasattr(owner, "call")
    assert "call" not in vars(kind)


def test_an_owner_is_not_kept_alive() -> None:
    """A patch does not keep its object alive, and undoing it afterwards does nothing."""

    class Owner:
        pass

    owner = Owner()
    patch, ref = apply_patch(owner, "name", lambda _: print), weakref.ref(owner)
    del owner
    assert ref() is None
    patch.undo()


def test_an_interrupt_before_the_patch_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower patch is undone as usual; undoing a patch that was never applied does nothing."""
    owner = SimpleNamespace(call=Owner.call)
    lower = apply_patch(owner, "call", around("lower"))
    upper = Patch(owner, "call", around("upper"))
    upper.undo()
    assert owner.call() == "lower(original)"
    upper = Patch(owner, "call", around("upper"))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Patch, "_set", interrupt)
        upper.apply()
    upper.undo()
    assert owner.call() == "lower(original)"
    lower.undo()
    assert owner.call is Owner.call


def test_undone_while_it_is_applied() -> None:
    """A patch can be undone by a signal handler or another thread while it makes the replacement."""
    owner = SimpleNamespace(call=Owner.call)

    def make(original: Any) -> Any:
        early.undo()
        return lambda: "left"

    early = Patch(owner, "call", make)
    early.apply()
    assert owner.call is Owner.call
    assert (id(owner), "call") not in patch._tops


def test_undo_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that does not recur on the second attempt leaves no patch behind; a lasting one raises."""
    owner = SimpleNamespace(call=Owner.call, other=Owner.call)
    patches = [apply_patch(owner, name, around(name)) for name in ("call", "other")]
    failures = 1
    undo_one = Patch.undo

    def failing(one: Patch) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise MemoryError
        undo_one(one)

    monkeypatch.setattr(Patch, "undo", failing)
    undo(patches)
    assert (owner.call, owner.other, patches) == (Owner.call, Owner.call, [])
    patches = [apply_patch(owner, "call", around("call"))]
    failures = 2
    with pytest.raises(MemoryError):
        undo(patches)
    undo(patches)
    assert (owner.call, patches) == (Owner.call, [])
