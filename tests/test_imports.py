"""Import hooks call a function at the import of a module, until they are undone."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instrument.imports import ImportHook, loaded_modules


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that is not imported so far."""
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_late", raising=False)
    importlib.invalidate_caches()
    return "imported_late"


def test_called_at_the_import(module: str) -> None:
    """The function gets the module, once, when the import has run the module's code."""
    values: list[int] = []
    ImportHook(module, lambda imported: values.append(imported.value)).apply()
    assert values == []
    importlib.import_module(module)
    importlib.import_module(module)
    assert values == [1]


def test_called_at_once_for_an_imported_module(module: str) -> None:
    """A module that is imported already gets its call from `apply`."""
    values: list[int] = []
    importlib.import_module(module)
    ImportHook(module, lambda imported: values.append(imported.value)).apply()
    assert values == [1]


@pytest.mark.parametrize("applied", [True, False])
def test_not_called_after_undo(module: str, applied: bool) -> None:
    """`undo` cancels the call, also before `apply`, and the function is not kept alive."""

    class Owner:
        def imported(self, module: object) -> None:
            raise AssertionError(module)

    owner = Owner()
    hook, alive = ImportHook(module, owner.imported), weakref.ref(owner)
    if applied:
        hook.apply()
    hook.undo()
    hook.apply()
    del owner
    gc.collect()
    assert alive() is None
    importlib.import_module(module)


class _PassesForModule:
    """As libraries of cffi: the class that it shows is that of modules, and it has no namespace."""

    __slots__ = ()
    __class__ = ModuleType  # type: ignore[assignment]


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} would be loaded")


def test_loaded_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy modules are not loaded, and objects that only pass for modules are left out."""
    lazy, other = _Lazy("lazy"), _PassesForModule()
    assert isinstance(other, ModuleType)
    with pytest.raises(AttributeError):
        object.__getattribute__(other, "__dict__")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    monkeypatch.setitem(sys.modules, "passes", other)
    monkeypatch.setitem(sys.modules, "blocked", None)
    found = {name: (module, names) for name, module, names in loaded_modules()}
    assert found["lazy"] == (lazy, vars(lazy))
    assert found[__name__] == (sys.modules[__name__], globals())
    assert not {"passes", "blocked"} & set(found)
