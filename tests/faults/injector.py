"""Makes one call of one library function raise, in a process that has not imported the library yet."""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

SOURCE = Path(__file__).parents[2] / "src" / "instrument"
_IMPORTING = ("<frozen importlib", importlib.__file__, str(SOURCE / "__init__.py"))
HIT = "__instrument_fault__"
INTERRUPTS = "instrument.base.interrupts:"
BEGIN = "instrument.record.windows.schedule_follower:ScheduleFollower._advance"
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (RuntimeError, MemoryError, OSError, RecursionError)
}


class Faults:
    """Counts the calls of each function, and raises in the armed call.

    Attributes:
        names: the functions, as "module:qualified name"; calls refer to them by index.
        places: the names, by the file, first line and unqualified name, to name the function of a frame.
        counts: the number of calls of each function.
        fired: whether the error was raised.
        within: the function that raised the error. For a function of `interrupts`, which only serves a ``with`` or
            ``try`` statement of its caller: that caller.
        importing: how many modules of the library are being imported.
        by_program: whether a statement of the program started these imports.
        in_import: whether the error was raised while a statement of the program imported a module.
        in_setup: whether the error was raised before the schedule of the windows began.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.places: dict[tuple[str, int, str], str] = {}
        self.counts: list[int] = []
        self.fired = self.in_import = self.in_setup = False
        self.within = ""
        self.importing = 0
        self.by_program = False
        self._function = self._call = -1
        self._error: type[Exception] = RuntimeError

    def arm(self, name: str, call: int, error: type[Exception]) -> None:
        """Raise ``error`` in the call number ``call`` (from 1) of the function ``name``."""
        self._function, self._call, self._error = self.names.index(name), call, error

    def __call__(self, function: int) -> None:
        """Count a call, and raise in the armed one; every function of the library begins with this call."""
        count = self.counts[function] = self.counts[function] + 1
        if function == self._function and count == self._call:
            self.fired, self.in_import = True, self.importing > 0 and self.by_program
            self.in_setup = not self.counts[self.names.index(BEGIN)]
            self.within = self._served(sys._getframe(1), self.names[function])
            raise self._error(f"injected into {self.names[function]}")

    def _served(self, frame: FrameType | None, name: str) -> str:
        while frame is not None and name.startswith(INTERRUPTS):
            code = frame.f_code
            name = self.places.get((code.co_filename, code.co_firstlineno, code.co_name), name)
            frame = frame.f_back
        return name


class Instrumenter(ast.NodeTransformer):
    """Makes each function report its calls, within a ``try`` for ``Exception`` at the beginning of its body.

    Assignments of constants and names, which cannot fail, may precede the ``try``.
    """

    def __init__(self, module: str, file: Path, faults: Faults) -> None:
        self._file = str(file)
        self._faults = faults
        self._path = [module]

    def _hit(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, name: str) -> ast.Call:
        qualified = f"{self._path[0]}:{'.'.join([*self._path[1:], name])}"
        same = sum(known.split("#")[0] == qualified for known in self._faults.names)
        self._faults.names.append(f"{qualified}#{same}" if same else qualified)
        first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
        self._faults.places[self._file, first, name] = self._faults.names[-1]
        self._faults.counts.append(0)
        call = ast.Call(ast.Name(HIT, ast.Load()), [ast.Constant(len(self._faults.names) - 1)], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        hit = self._hit(node, node.name)
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()
        body: list[ast.stmt] = node.body
        first = next((at for at, statement in enumerate(body) if not _cannot_fail(statement)), 0)
        while first < len(body) and isinstance(body[first], ast.Try) and _catches_all(body[first]):
            body, first = body[first].body, 0  # type: ignore[attr-defined]
        body.insert(first, ast.copy_location(ast.Expr(hit), node))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        hit = self._hit(node, "<lambda>")
        self.generic_visit(node)
        node.body = ast.copy_location(ast.BoolOp(ast.Or(), [hit, node.body]), node)
        return node


def _cannot_fail(statement: ast.stmt) -> bool:
    """Return whether ``statement`` is a docstring, or assigns constants, names or attributes."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    value = getattr(statement, "value", None)
    values = value.elts if isinstance(value, ast.Tuple) else [value]
    return isinstance(statement, (ast.Assign, ast.AnnAssign)) and all(
        isinstance(value, (ast.Constant, ast.Name, ast.Attribute)) for value in values
    )


def _catches_all(node: Any) -> bool:
    kinds = [handler.type for handler in node.handlers]
    return any(isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException") for kind in kinds)


class Loader(importlib.abc.InspectLoader):
    """Executes the compiled code of a module."""

    def __init__(self, code: CodeType, path: Path, faults: Faults) -> None:
        self._code = code
        self.path = path
        self._faults = faults

    def exec_module(self, module: ModuleType) -> None:
        if not self._faults.importing:
            self._faults.by_program = _program_imports(sys._getframe(1))
        self._faults.importing += 1
        try:
            super().exec_module(module)
        finally:
            self._faults.importing -= 1

    def get_source(self, fullname: str) -> str:
        return self.path.read_text()

    def get_code(self, fullname: str) -> CodeType:
        return self._code

    def is_package(self, fullname: str) -> bool:
        return self.path.stem == "__init__"


def _program_imports(frame: FrameType | None) -> bool:
    """Return whether the import in ``frame`` is a statement of the program rather than of the package.

    Imports by the package's ``__getattr__`` count as statements of the program.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_IMPORTING):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(str(SOURCE))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the library's modules, and compiles all of them at its creation."""

    def __init__(self, faults: Faults) -> None:
        self._loaders: dict[str, Loader] = {}
        for path in sorted(SOURCE.rglob("*.py")):
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            tree = Instrumenter(name, path, faults).visit(ast.parse(path.read_text()))
            self._loaders[name] = Loader(compile(tree, str(path), "exec", dont_inherit=True), path, faults)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        loader = self._loaders.get(fullname)
        if loader is None:
            return None
        return importlib.util.spec_from_file_location(fullname, loader.path, loader=loader)


def install() -> Faults:
    """Install the finder, so that the library's functions can be made to raise; return its `Faults`."""
    assert "instrument" not in sys.modules
    faults = Faults()
    setattr(builtins, HIT, faults)
    sys.meta_path.insert(0, Finder(faults))
    return faults
