"""The layers of the package: imports run downward only, and `import instrument` stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from instrument.cli import SUBCOMMANDS

SOURCE = Path(__file__).parent.parent / "src" / "instrument"

# From top to bottom. A package imports those on later lines; modules on one line do not import each other.
ORDER = [
    ["__main__"],
    ["cli", "pytest_plugin"],
    ["commands"],
    ["bootstrap", "launch"],
    ["integrations"],
    ["__init__"],
    ["windows"],
    ["allocator_history"],
    ["exporters"],
    ["slow_steps"],
    ["dryrun"],
    ["report"],
    ["slimming"],
    ["comparison"],
    ["diagnosis"],
    ["replay"],
    ["syncs"],
    ["stepping"],
    ["memory"],
    ["traces"],
    ["page"],
    ["modules"],
    ["regions"],
    ["cuda_graphs"],
    ["gpu_wait"],
    ["guard"],
    ["config", "compat"],
    ["console", "errors", "gpu", "identity", "log", "patch", "tools"],
    ["descriptors", "sigaction", "stderr"],
    ["findings", "run_folder"],
    ["open_window"],
    ["part_file"],
    ["process_id"],
    ["arguments", "imports", "interrupts", "live_objects", "printable", "source_paths", "trace_marks", "units"],
]
# Modules that adapters may import besides the public names of the package: their internal interface.
ADAPTER_INTERFACE = {
    "arguments", "config", "errors", "guard", "identity", "imports", "interrupts", "log", "patch",
    "modules.service", "regions.dispatch", "regions.region", "stderr", "stepping.optimizer_steps",
    "windows.api", "windows.profile", "windows.schedule", "windows.steps", "windows.trace_processor",
}  # fmt: skip
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def package_of(module: tuple[str, ...]) -> str:
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


@pytest.mark.parametrize("path", modules(), ids=lambda path: ".".join(name(path)))
def test_imports_run_downward(path: Path) -> None:
    """A module imports its own package and those below, none above or on the same level."""
    own = package_of(name(path))
    if own == "__init__":
        return
    for module in imports(path, ast.parse(path.read_text())):
        other = package_of(module)
        assert other == own or LEVEL[own] < LEVEL[other], f"{'.'.join(name(path))} imports {'.'.join(module)}"


def test_integrations_import_an_interface() -> None:
    """Integrations import exactly the modules of `ADAPTER_INTERFACE` from other packages."""
    imported = {
        ".".join(module[1:])
        for path in (SOURCE / "integrations").rglob("*.py")
        for module in imports(path, ast.parse(path.read_text()))
        if package_of(module) != "integrations"
    }
    assert imported - {""} == ADAPTER_INTERFACE


def test_no_cycles() -> None:
    """No module imports itself through others."""
    known = {name(path): path for path in modules()}
    needs = {
        module: {found for found in imports(path, ast.parse(path.read_text())) if found in known}
        for module, path in known.items()
        if module != ("instrument",)
    }
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> None:
        assert module not in above, " -> ".join(".".join(part) for part in (*above, module))
        if module not in done:
            for needed in needs.get(module, ()):
                visit(needed, (*above, module))
            done.add(module)

    for module in needs:
        visit(module, ())


def test_every_package_has_a_level() -> None:
    """Each package is in the order."""
    assert {package_of(name(path)) for path in modules()} <= set(LEVEL)


def test_hot_path_imports_little() -> None:
    """The modules of `annotate` have no heavy imports at their top."""
    for path in (SOURCE / "regions").rglob("*.py"):
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
    loaded = fresh(f"from instrument.cli import app\napp({line}, standalone_mode=False)")
    assert not {"torch", "numpy", "instrument.traces.read", "instrument.diagnosis"} & set(loaded)


def test_help_is_light() -> None:
    """`--help` imports neither numpy nor a reader of traces, and no command but the one that it is about."""
    lines = [[], *([name] for name in SUBCOMMANDS)]
    code = "from instrument.cli import app\n"
    code += "".join(f"app({[*line, '--help']}, standalone_mode=False)\n" for line in lines)
    loaded = set(fresh(code))
    heavy = ("traces.read", "diagnosis.diagnose", "memory", "replay", "comparison", "windows", "launch", "page")
    assert not {"numpy", "torch", "msgspec", "jinja2", *(f"instrument.{name}" for name in heavy)} & loaded
    assert not [name for name in fresh("from instrument.cli import app\napp(['--help'], standalone_mode=False)")
                if name.startswith("instrument.commands.") and name.rpartition(".")[2] in SUBCOMMANDS]  # fmt: skip


def test_all() -> None:
    """Every name in `__all__` is available, whatever was imported before."""
    code = """
import instrument
import instrument.windows.schedule, instrument.regions.dispatch, instrument.exporters.capture
for name in instrument.__all__:
    assert callable(getattr(instrument, name)), name
assert set(instrument.__all__) <= set(dir(instrument))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    import instrument

    with pytest.raises(AttributeError, match="module 'instrument' has no attribute 'nothing'"):
        instrument.nothing  # noqa: B018
