"""The objects of a class are found among all objects of the process."""

from __future__ import annotations

from typing import Any

from instrument.base.live_objects import live_objects


class Meta(type):
    """A metaclass that compares, so that its classes have no hash."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("on purpose")


class Base:
    pass


class Derived(Base):
    pass


class Odd(metaclass=Meta):
    pass


def test_subclasses_are_found() -> None:
    """Objects of the class and of its subclasses are found, whatever else lives."""
    objects: list[Any] = [Base(), Derived(), Odd()]
    found = live_objects(Base)
    assert {id(each) for each in found} == {id(each) for each in objects[:2]}
    assert [type(each) for each in live_objects(Derived)] == [Derived]


def test_no_such_object() -> None:
    """Without an object of the class, none is found."""
    assert live_objects(type("Unused", (), {})) == []
