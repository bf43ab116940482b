"""Module names in strings, by which the library detects imported modules, name modules that exist."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from instrument.base.compat import compiler
from instrument.integrations import megatron
from instrument.start import launch
from instrument.start.bootstrap import begin, session

SOURCE = Path(__file__).parent.parent / "src" / "instrument"
TABLES = (compiler.GRAPH_MAKERS, begin.ADAPTERS, session.LAUNCHERS, megatron.HOOKS, launch.MODULES)
FUNCTIONS = {"when_imported", "import_module"}
NOT_FILES = {"__main__", "torch.ops"}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the constants in ``sys.modules[...]``, ``sys.modules.get(...)`` and calls of `FUNCTIONS`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            found: ast.expr | None = node.slice
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            looks_up = called == "sys.modules.get" or called.rpartition(".")[2] in FUNCTIONS
            found = node.args[0] if looks_up else None
        else:
            continue
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and not found.value.startswith("."):
            yield found.value


def exists(name: str) -> bool:
    """Return whether a module exists, without an import of its package."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not rest:
        return True
    places = [folder.joinpath(*rest) for folder in folders]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


TEXTS = [path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")]
# To parse all of them takes two seconds.
RELEVANT = [text for text in TEXTS if any(word in text for word in ("sys.modules", *FUNCTIONS))]
NAMES = {name for text in RELEVANT for name in names_in(ast.parse(text))}
NAMES |= {name for table in TABLES for name in table}


def test_names_are_found() -> None:
    """The search finds the names of torch and of frameworks."""
    assert len(NAMES) > 30
    assert {"torch.autograd.profiler", "transformers.trainer", "deepspeed.runtime.pipe.engine"} <= NAMES


@pytest.mark.parametrize("name", sorted(NAMES - NOT_FILES))
def test_module_exists(name: str) -> None:
    """Each name exists; a misspelt name would silently disable its feature."""
    package = "megatron.training" if name.startswith("megatron.training.") else name.partition(".")[0]
    if not exists(package):  # the wheel of Megatron has only megatron.core
        pytest.skip(f"{package} is not installed")
    if name == "torch.xpu.graphs" and not hasattr(torch.xpu, "XPUGraph"):
        pytest.skip("this version of torch has no graphs of XPUs")
    assert exists(name)
