"""Private names of torch and nvtx occur only in `instrument.base.compat` and in the dry run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "instrument"
PACKAGES = {"torch", "nvtx"}
ALLOWED = ("base/compat/", "syncs/dryrun/")  # each name there has a fallback, or is emulated


def private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def chain(node: ast.AST) -> list[str]:
    """Return the names of a chain ``a.b.c``; empty if it starts with something other than a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the imports and attribute chains in ``tree`` that use a private name of the packages.

    A chain counts if it starts with a package, or with a name that the same file imports from one. Attributes of
    other objects, and names in strings, are not detected.
    """
    imported = set(PACKAGES)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            path = node.module.split(".")
            if path[0] in PACKAGES:
                imported |= {alias.asname or alias.name for alias in node.names}
                if any(private(name) for name in [*path, *(alias.name for alias in node.names)]):
                    yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name.split(".")
                if path[0] in PACKAGES:
                    imported.add(alias.asname or path[0])
                    if any(private(name) for name in path):
                        yield ast.unparse(node)
    for node in ast.walk(tree):
        names = chain(node)
        if names and names[0] in imported and any(private(name) for name in names[1:]):
            yield ".".join(names)


def violations() -> dict[str, list[str]]:
    """Return the private names in each file outside `ALLOWED`."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        if not file.startswith(ALLOWED):
            names = sorted(set(private_names(ast.parse(path.read_text(encoding="utf-8")))))
            if names:
                found[file] = names
    return found


def test_private_names_occur_only_in_allowed_files() -> None:
    """No file outside `compat` and the dry run uses a private name."""
    assert violations() == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._C.x()",
        "import torch\ntorch.autograd._record_function(1).y",
        "import torch._dynamo",
        "import torch._dynamo as dynamo",
        "from torch import _ops",
        "from torch._subclasses import fake_tensor",
        "from torch.autograd import profiler as p\np._run_on_profiler_start()",
        "import torch.autograd.profiler as p\np._is_profiler_enabled",
        "from nvtx._lib import lib",
    ],
)
def test_detected(code: str) -> None:
    """Imports and chains with a private segment are detected, also through an alias."""
    assert list(private_names(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.__version__",
        "import torch\ntorch.autograd.profiler.profile()",
        "from torch.nn import Module\nModule.__init__",
        "from . import _ops\nself._stack",
        "from torch import nn\nnode._stack.torch",
    ],
)
def test_ignored(code: str) -> None:
    """Public and special names, and private names of other packages, are ignored."""
    assert not list(private_names(ast.parse(code)))
