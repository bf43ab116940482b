"""Regions in JAX's traces, in programs that use JAX and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instrument import annotate
from tests.support.programs import environment, program, python, run

pytestmark = pytest.mark.process

STAND_IN = """
class TraceAnnotation:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        print("open", self.name)

    def __exit__(self, *_):
        print("close", self.name)
"""
RECORD = """
    import sys
    from torch.profiler import ProfilerActivity, profile
    from instrument import annotate, configure

    def record(name):
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            with annotate(name), annotate("inner"):
                pass
        return {event.key for event in prof.key_averages()}
"""


def output(script: str, folder: Path) -> tuple[list[str], list[str]]:
    """Run `script` with a stand-in for jax in ``sys.argv[1]``; return its output and the log."""
    (folder / "jax").mkdir()
    (folder / "jax" / "__init__.py").touch()
    (folder / "jax" / "profiler.py").write_text(STAND_IN)
    done = run(python(program(RECORD + script, folder), [str(folder)]), environment())
    return done.stdout.splitlines(), [line for line in done.stderr.splitlines() if line.startswith("instrument:")]


def test_jax_is_never_imported(tmp_path: Path) -> None:
    """The library never imports jax; once the program has, regions show in both while torch records."""
    # The program's folder is on sys.path, so jax could be imported at any time.
    script = """
    assert {"not here", "inner"} <= record("not here")
    assert "jax" not in sys.modules
    import jax
    assert {"here", "inner"} <= record("here")
    with annotate("no recording"):
        pass
    configure(emitters="torch")
    assert {"not chosen", "inner"} <= record("not chosen")
    configure(emitters="jax")
    with annotate("chosen"):
        pass
    """
    stdout, stderr = output(script, tmp_path)
    assert stdout == ["open here", "open inner", "close inner", "close here", "open chosen", "close chosen"]
    assert stderr == []


def test_jax_chosen_before_its_import(tmp_path: Path) -> None:
    """If jax is chosen but not imported, the program continues, and the log says so once."""
    script = """
    configure(emitters="jax")
    with annotate("x"), annotate("y"):
        print("done")
    """
    stdout, stderr = output(script, tmp_path)
    assert stdout == ["done"]
    assert len(stderr) == 1
    assert "jax is not imported: import jax before the emitter is used" in stderr[0]


def test_hidden_jax(tmp_path: Path) -> None:
    """With ``sys.modules["jax"] = None``, which tests use to hide a package, torch's trace has all regions."""
    stdout, stderr = output('\n    sys.modules["jax"] = None\n    assert "x" in record("x")', tmp_path)
    assert (stdout, stderr) == ([], [])


def test_real_jax(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """The real TraceAnnotation accepts the emitter's calls."""
    pytest.importorskip("jax.profiler")

    def work() -> None:
        with annotate("outer"), annotate("inner"):
            pass

    assert [event["name"] for event in recorded(work)] == ["outer", "inner"]
