"""Import hooks call a function at the import of a module, until they are undone."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import time
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instrument.base.imports import ImportHook, import_without_drawing, loaded_modules


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


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} would be loaded")


def test_loaded_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy modules are not loaded, and objects that only pass for modules are left out."""
    pytest.importorskip("cryptography.hazmat.bindings._rust")  # adds a library of cffi to the modules
    (library,) = (name for name, module in sys.modules.items() if type(module).__name__ == "Lib")
    assert isinstance(sys.modules[library], ModuleType)
    lazy = _Lazy("lazy")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    monkeypatch.setitem(sys.modules, "blocked", None)
    found = {name: (module, names) for name, module, names in loaded_modules()}
    assert found["lazy"] == (lazy, vars(lazy))
    assert found[__name__] == (sys.modules[__name__], globals())
    assert not {library, "blocked"} & set(found)


def test_a_module_that_another_thread_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is whole when the import returns."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.5)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    other = threading.Thread(target=importlib.import_module, args=("slow_to_import",))
    other.start()
    while "slow_to_import" not in sys.modules:
        time.sleep(0.001)
    try:
        assert import_without_drawing("slow_to_import").whole
    finally:
        other.join()
        del sys.modules["slow_to_import"]
