"""Lightning's two packages, and classes that derive from base classes of both."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import sys
from types import ModuleType
from typing import Any, ClassVar

from ...base.guard import guard

FEATURE = "following Lightning"
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def loaded() -> list[ModuleType]:
    """Return the packages that this process has imported; they share no classes."""
    modules = [sys.modules.get(name) for name in PACKAGES]
    return [module for module in modules if module is not None and hasattr(module, "Trainer")]


def packages() -> list[ModuleType]:
    """Return `loaded`, or the package that is installed.

    Raises:
        ImportError: neither is installed.
    """
    for name in PACKAGES if not loaded() else ():
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
            break
    else:
        if not loaded():
            raise ImportError("Lightning is not installed: pip install lightning")
    return loaded()


@functools.cache
def _with_bases(kind: Any, bases: tuple[type, ...]) -> Any:
    body = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, *bases), body | {"_kind": kind})


class LightningMixin:
    """Makes instances of a subclass derive from Lightning's class ``base`` of each package imported by then."""

    base: ClassVar[str]
    inert: ClassVar[str]  # Lightning's class that does nothing, used if no instance can be made
    _kind: ClassVar[type]  # without Lightning's base classes
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance that the Trainers of both packages accept."""
        try:
            module, name = cls.base.split(".")
            bases = [getattr(getattr(package, module), name) for package in packages()]
            kind = vars(cls).get("_kind", cls)
            made = object.__new__(_with_bases(kind, tuple(base for base in bases if not issubclass(kind, base))))
            made._arguments = args, kwargs
            return made
        except ImportError:
            raise
        except Exception as error:
            guard.failed(FEATURE, error)
        package = next(sys.modules[name] for name in PACKAGES if name in sys.modules)
        return operator.attrgetter(cls.inert)(package)()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self._kind, *self._arguments)  # a copy, as in a spawned process, starts from its arguments


def _make(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kind(*args, **kwargs)
