"""The base of all adapters: `attach`, `detach`, and failing hooks."""

from __future__ import annotations

import importlib
import inspect
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instrument.base.config import settings
from instrument.integrations.adapter import Adapter, Removal, require
from instrument.integrations.loop import Loop
from tests.support import warm
from tests.support.programs import environment, python

pytestmark = pytest.mark.framework


class Framework:
    """A class whose method is hooked."""

    def train(self, steps: int) -> int:
        return steps


class FrameworkAdapter(Adapter):
    """Hooks `Framework`, and then fails if ``fails`` is set."""

    fails = False

    def install_hooks(self) -> None:
        self.wrap(Framework, "train", self.in_region("train"))
        if self.fails:
            raise RuntimeError("failing")


TRAIN = Framework.train


@pytest.fixture
def adapter(tmp_path: Path) -> FrameworkAdapter:
    return FrameworkAdapter(Loop(tmp_path))


def test_attach_and_detach(adapter: FrameworkAdapter) -> None:
    """Repeated calls have no further effect, and an adapter can be attached again."""
    for _ in range(2):
        assert adapter.attach() is adapter.attach() is adapter
        assert Framework.train is not TRAIN
        assert 3 == Framework().train(3)
        assert 1 == len(adapter.changes)
        adapter.detach()
        adapter.detach()
        assert (False, TRAIN, []) == (adapter.attached, Framework.train, adapter.changes)


def test_context_manager(adapter: FrameworkAdapter) -> None:
    """The end of the block detaches, and stops the loop."""
    with adapter.attach() as attached:
        attached.loop.start()
        assert Loop.current() is adapter.loop
    assert (None, TRAIN) == (Loop.current(), Framework.train)


@pytest.mark.usefixtures("lenient")
def test_failing_hook(adapter: FrameworkAdapter) -> None:
    """If one hook fails, all are removed."""
    adapter.fails = True
    adapter.attach()
    assert (False, TRAIN, []) == (adapter.attached, Framework.train, adapter.changes)


@pytest.mark.usefixtures("lenient")
def test_change_that_cannot_be_undone(adapter: FrameworkAdapter) -> None:
    """The other changes are undone, and the failing one at the next `detach`."""
    adapter.attach()
    failing = [True]

    def remove() -> None:
        if failing:
            raise RuntimeError("not now")

    adapter.apply(Removal(remove))
    adapter.detach()
    assert (1, TRAIN) == (len(adapter.changes), Framework.train)
    failing.clear()
    adapter.detach()
    assert [] == adapter.changes


@pytest.mark.usefixtures("lenient")
def test_inert_adapter() -> None:
    """An inert adapter installs nothing."""
    adapter = FrameworkAdapter.inert("any", argument=1)
    with adapter.attach():
        assert (False, TRAIN, []) == (adapter.attached, Framework.train, adapter.windows)


def test_instrument_0(adapter: FrameworkAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under INSTRUMENT=0 nothing is hooked."""
    monkeypatch.setattr(settings, "enabled", False)
    assert not adapter.attach().attached
    assert Framework.train is TRAIN


def test_missing_method(adapter: FrameworkAdapter, caplog: pytest.LogCaptureFixture) -> None:
    """A method that the framework's version lacks is logged and skipped."""
    with caplog.at_level(logging.INFO, "instrument"):
        adapter.wrap(Framework, "fit", adapter.in_region("fit"))
    assert "Framework has no fit, which is not followed" in caplog.text
    assert [] == adapter.changes


def test_imported_later(adapter: FrameworkAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback for a module runs when it is imported, unless the adapter is detached by then."""
    found: list[ModuleType] = []
    adapter.attach()
    adapter.when_imported("json", found.append)
    adapter.detach()
    adapter.when_imported("json", found.append)
    assert [importlib.import_module("json")] == found


def test_at_exit(tmp_path: Path) -> None:
    """An adapter that is still attached is detached at exit, which writes the open window."""
    script = tmp_path / "script.py"
    script.write_text(f"""
from instrument.integrations.adapter import Adapter
from instrument.integrations.loop import Loop
adapter = Adapter(Loop({str(tmp_path / "out")!r}, wait=0, warmup=0, active=9)).attach()
adapter.loop.start()
adapter.loop.step()
""")
    warm.run(python(script), environment(), check=True)
    assert '"partial"' in (tmp_path / "out" / "manifest.jsonl").read_text()


def test_require_package() -> None:
    """The error for a missing package has the command that installs it."""
    require("json")
    with pytest.raises(ImportError, match="pip install no-such"):
        require("no_such.core", "no-such")


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "megatron", "torchtitan", "vllm"])
def test_signature_of_attach(name: str, tmp_path: Path) -> None:
    """`attach` takes a folder, keywords of the framework and those of `Loop`, and returns an adapter."""
    module: Any = pytest.importorskip(f"instrument.integrations.{name}", exc_type=ImportError)
    signature = inspect.signature(module.attach)
    first, *others = signature.parameters.values()
    assert ("out", inspect.Parameter.POSITIONAL_OR_KEYWORD) == (first.name, first.kind)
    *keywords, options = others
    assert {inspect.Parameter.KEYWORD_ONLY} >= {parameter.kind for parameter in keywords}
    assert inspect.Parameter.VAR_KEYWORD is options.kind

    assert issubclass(getattr(module, signature.return_annotation), Adapter)
