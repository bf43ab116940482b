"""The layers of the package: imports run downward only, and `import instrument` stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from instrument.start.cli import SUBCOMMANDS

SOURCE = Path(__file__).parent.parent / "src" / "instrument"

# What each wing may import besides itself; "*" is every wing.
MAY_IMPORT = {
    "base": "",
    "record": "base",
    "read": "base",
    "explain": "read base",
    "syncs": "record explain base",
    "forecast": "syncs explain read base",
    "show": "explain read base",
    "finish": "show explain read record base",
    "integrations": "record base __init__",
    "start": "*",
    "__main__": "*",
    "__init__": "*",
}
# The one exception: what these read and explain shows itself, by a function-level import: `to_html` and its like.
SHOW_THEMSELVES = ("read", "explain")


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def wing_of(module: tuple[str, ...]) -> str:
    return module[1] if len(module) > 1 else "__init__"


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield the modules of `instrument` that ``tree`` imports, at any place."""
    package = name(path) if path.stem == "__init__" else name(path)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                tuple(alias.name.split(".")) for alias in node.names if alias.name.startswith("instrument")
            )
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module or "").split(".")) if node.module else base
            if module[:1] != ("instrument",):
                continue
            for alias in node.names:
                inner = (*module, alias.name)
                file = SOURCE.parent.joinpath(*inner)
                yield inner if file.with_suffix(".py").exists() or file.is_dir() else module


def top_level(tree: ast.Module) -> ast.Module:
    """Return ``tree`` without the bodies of its functions."""

    class WithoutBodies(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

    return WithoutBodies().visit(tree)


@pytest.mark.parametrize("path", modules(), ids=lambda path: ".".join(name(path)))
def test_imports_run_downward(path: Path) -> None:
    """A module imports its own wing and those that the table names."""
    own, allowed = wing_of(name(path)), MAY_IMPORT[wing_of(name(path))].split()
    at_top = set(imports(path, top_level(ast.parse(path.read_text()))))
    for module in imports(path, ast.parse(path.read_text())):
        other = wing_of(module)
        shown = own in SHOW_THEMSELVES and other == "show" and module not in at_top
        right = other == own or other in allowed or "*" in allowed or shown
        assert right, f"{'.'.join(name(path))} imports {'.'.join(module)}"


def test_no_cycles() -> None:
    """No module imports itself through others, and no room, except to show itself."""
    known = {name(path): path for path in modules() if name(path) != ("instrument",)}
    needs = {
        module: {
            found
            for found in imports(path, ast.parse(path.read_text()))
            if found in known and not (wing_of(module) in SHOW_THEMSELVES and wing_of(found) == "show")
        }
        for module, path in known.items()
    }
    rooms: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for module, found in needs.items():
        rooms.setdefault(module[:3], set()).update(other[:3] for other in found if other[:3] != module[:3])
    for graph in (needs, rooms):
        done: set[tuple[str, ...]] = set()

        def visit(
            module: tuple[str, ...],
            above: tuple[tuple[str, ...], ...],
            graph: dict[tuple[str, ...], set[tuple[str, ...]]] = graph,
            done: set[tuple[str, ...]] = done,
        ) -> None:
            assert module not in above, " -> ".join(".".join(part) for part in (*above, module))
            if module not in done:
                for needed in graph.get(module, ()):
                    visit(needed, (*above, module))
                done.add(module)

        for module in graph:
            visit(module, ())


def test_the_wings() -> None:
    """The package holds the wings of the table, and nothing else."""
    assert {wing_of(name(path)) for path in modules()} == set(MAY_IMPORT)


def test_hot_path_imports_little() -> None:
    """The modules of `annotate` have no heavy imports at their top."""
    for path in (SOURCE / "record" / "regions").rglob("*.py"):
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        named = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        assert not named & {"structlog", "wrapt", "torch", "nvtx", "rich", "msgspec"}, path


def fresh(code: str) -> dict[str, list[str]]:
    source = "import sys, json; before = set(sys.modules)\n" + code
    source += "\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    run = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_import_is_light() -> None:
    """`import instrument` imports nothing but itself."""
    assert fresh("import instrument") == ["instrument"]


def test_annotate_is_light() -> None:
    """Decorating a function imports neither torch nor nvtx."""
    loaded = fresh("import instrument\n@instrument.annotate\ndef f(): pass\nf()")
    assert not {"torch", "nvtx", "numpy", "structlog", "msgspec", "rich"} & set(loaded)


def test_run_is_light() -> None:
    """`instrument run` starts a program without importing numpy or a reader of traces."""
    line = "['run', '--print-command', 'train.py']"
    loaded = fresh(f"from instrument.start.cli import app\napp({line}, standalone_mode=False)")
    assert not {"torch", "numpy", "instrument.read.jobs.read", "instrument.explain.diagnosis"} & set(loaded)


def test_help_is_light() -> None:
    """`--help` imports neither numpy nor a reader of traces, and no command but the one that it is about."""
    lines = [[], *([name] for name in SUBCOMMANDS)]
    code = "from instrument.start.cli import app\n"
    code += "".join(f"app({[*line, '--help']}, standalone_mode=False)\n" for line in lines)
    loaded = set(fresh(code))
    heavy = {"numpy", "torch", "msgspec", "jinja2", "instrument.read", "instrument.explain.diagnosis"}
    heavy |= {"instrument.record.windows", "instrument.start.launch", "instrument.show.page"}
    assert not heavy & loaded
    alone = fresh("from instrument.start.cli import app\napp(['--help'], standalone_mode=False)")
    assert not {f"instrument.start.commands.{name}" for name in SUBCOMMANDS} & set(alone)


def test_all() -> None:
    """Every name in `__all__` is available, whatever was imported before."""
    code = """
import instrument
import instrument.record.planning.schedule, instrument.record.regions.dispatch
import instrument.record.exporters.exporter
for name in instrument.__all__:
    assert callable(getattr(instrument, name)), name
assert set(instrument.__all__) <= set(dir(instrument))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    import instrument

    with pytest.raises(AttributeError, match="module 'instrument' has no attribute 'nothing'"):
        instrument.nothing  # noqa: B018
