"""docs/architecture.md and docs/patches.md: files and names exist, wings and patches are complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.test_layers import MAY_IMPORT, SOURCE

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PATCHES = (ROOT / "docs" / "patches.md").read_text()

# Names (last part) of functions and attributes that change or register something outside the package.
NAMES = re.compile(
    r"Patch|register_\w*hook|_register_hook_dict|register_prehook|when_imported|ImportHook|register_at_fork|_queued_calls"
    r"|DEFAULT_CALLBACKS|sync_callbacks|set_sync_debug_mode|meta_path|path_hooks|set_wakeup_fd|setitimer|set_stance"
    r"|set_default_device|addFilter|addHandler|settrace|setprofile|addaudithook|_register_builtin|in_dll"
)
CALLS = {"atexit.register", "signal.signal", "signal.alarm"}
INTERNAL = {"read/kineto/event_args.py"}  # modules that call `setattr` only on objects of the package


def rooms() -> list[tuple[str, str]]:
    """Return the rows of the tables of rooms: each room, and what its row says."""
    rows = []
    room = ""
    for named, rest in re.findall(r"^\| (?:`([\w/]+/)`)? ?\| (.*\?.* \| .*) \|$", PAGE, re.MULTILINE):
        room = named or room
        rows.append((room, rest))
    return rows


def full_name(node: ast.AST, imported: dict[str, str]) -> str:
    """Return a name with its module, such as ``signal.signal``, also where the module has an alias."""
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, imported)}.{node.attr}"
    return imported.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def changes(path: Path) -> Iterator[str]:
    """Yield the names by which a module patches, hooks or registers something outside the package."""
    tree = ast.parse(path.read_text())
    imported = {}  # full names of modules and their members, by alias
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {(alias.asname or alias.name).partition(".")[0]: alias.name for alias in node.names}
            modules |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name for name in ("sys", "torch", "warnings") if f"{node.module}.".startswith(f"{name}.")}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            name = full_name(node, imported)
            if NAMES.fullmatch(name.rpartition(".")[2]) and not isinstance(node, ast.Name):
                yield name
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMES.fullmatch(node.value):
            yield node.value
        if isinstance(node, ast.Call):
            name = full_name(node.func, imported)
            if (
                name in CALLS
                or NAMES.fullmatch(name.rpartition(".")[2])
                or re.search(r"(adapter|self)\.wrap$", name)
            ):
                yield name
            if name == "setattr" and ast.unparse(node.args[0]) != "self":
                yield f"setattr({ast.unparse(node.args[0])})"
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)) else ():
            for changed in target.elts if isinstance(target, ast.Tuple) else [target]:
                owner = changed.value if isinstance(changed, ast.Subscript) else changed
                root = ast.unparse(owner).partition(".")[0]
                if isinstance(owner, ast.Attribute) and root in modules:
                    yield f"{ast.unparse(changed)} = "


def test_every_module_that_changes_something_is_in_the_table() -> None:
    """Each module that patches, hooks or registers has its row, and each row has such a module."""
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", PATCHES, re.MULTILINE)
    found = {str(path.relative_to(SOURCE)): sorted({*changes(path)}) for path in SOURCE.rglob("*.py")}
    found = {path: names for path, names in found.items() if names and path not in INTERNAL}
    assert {path: names for path, names in found.items() if path not in listed} == {}
    assert set(listed) - set(found) == set()
    assert len(listed) == len(set(listed))


def test_files_exist() -> None:
    """Every file that the pages name with its folder exists, except those in the recipes."""
    files = set(re.findall(r"`(\w[\w.]*/[\w/.]*(?:\.py|/))`", PAGE + PATCHES))
    assert len(files) > 100
    missing = {file for file in files if not (SOURCE / file).exists() and not (ROOT / file).exists()}
    assert {file for file in missing if "NAME" not in file} == set()


def test_modules_of_rooms_exist() -> None:
    """A module in the row of a room lies in that room, and a name after it is defined there."""
    modules = [
        (SOURCE / room / file, name)
        for room, row in rooms()
        for file, name in re.findall(r"`(\w+\.py)`(?:, `(\w+)`)?", row)
    ]
    assert len(modules) > 100
    for file, name in modules:
        assert file.exists(), file
        assert not name or defines(file, name), (file, name)


def test_each_room_has_its_row() -> None:
    """Every folder of the package with modules in it has a row, and every wing is in the table of wings."""
    folders = {f"{path.parent.relative_to(SOURCE)}/" for path in SOURCE.rglob("*.py") if path.stem != "__init__"}
    wings = {wing for wing in MAY_IMPORT if not wing.startswith("_")}
    within = {"integrations/megatron/", "start/bootstrap/site/"}
    loose = {"./", "record/"}  # modules beside the rooms
    assert {room for room, _ in rooms()} - {f"{wing}/" for wing in wings} >= {
        folder for folder in folders - within - loose if folder.count("/") > 1
    }
    table = re.findall(r"^\| (`\w+/`(?:, `\w+/`)*) \| .* \| .* \|$", PAGE, re.MULTILINE)
    assert {name for row in table for name in re.findall(r"`(\w+)/`", row)} >= wings


def test_names_exist() -> None:
    """A name that follows a file with its folder is defined in that file."""
    pairs = re.findall(r"`([\w]+/[\w/]+\.py)`,\s+`(\w+)`", PAGE)
    assert len(pairs) > 10
    for file, name in pairs:
        assert defines(SOURCE / file, name), (file, name)


def defines(file: Path, name: str) -> bool:
    """Return whether a module defines a name at its top level."""
    return bool(re.search(rf"^(?:def|class) {name}\b|^{name}\b", file.read_text(), re.MULTILINE))


def test_methods_that_undo_exist() -> None:
    """Each `Class.method` that undoes something is defined in that class or in a base class."""
    methods: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                functions = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                methods.setdefault(node.name, set()).update(functions)
                bases.setdefault(node.name, set()).update(ast.unparse(base) for base in node.bases)
    rows = [row for row in PATCHES.splitlines() if row.startswith("| `")]
    named = [pair for row in rows for pair in re.findall(r"`([A-Z]\w+)\.(\w+)`", row.split(" | ")[3])]
    assert len(named) > 25
    for owner, method in named:
        assert method in methods[owner].union(*(methods.get(base, set()) for base in bases[owner])), (
            owner,
            method,
        )
