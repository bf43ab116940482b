"""The real Nsight Systems: record a program without a GPU and read its ranges back."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support import warm
from tests.support.programs import ToolFailed, environment, program, python, run
from tests.support.ranges import Node, Range, tree

CATEGORY, MARK, PUSH_POP, START_END, DOMAIN = 33, 34, 59, 60, 75  # NVTX_EVENTS.eventType
KINDS = {MARK: "mark", PUSH_POP: "push_pop", START_END: "start_end"}
T = TypeVar("T")
PAYLOADS = ("uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue", "jsonText")


@dataclass(frozen=True)
class Report:
    """The results of one run of `nsys profile`."""

    returncode: int
    stdout: str
    stderr: str
    files: list[Path]  # .nsys-rep, in the order of their numbers

    @property
    def file(self) -> Path:
        """The only report file."""
        if len(self.files) != 1:
            raise AssertionError(f"expected one report, got {self.files}\n{self.stdout}\n{self.stderr}")
        return self.files[0]


def nsys() -> str:
    """Return the path of nsys, or skip the test."""
    path = shutil.which("nsys")
    if path is None:
        pytest.skip("Nsight Systems is not installed: run scripts/install-nsys.sh")
    return path


def version() -> tuple[int, int]:
    """Return the year and the release of the installed nsys, such as (2022, 4)."""
    text = run([nsys(), "--version"], environment()).stdout
    year, release = text.split("version")[-1].split()[0].split(".")[:2]
    return int(year), int(release)


def capture_range_end(count: int) -> str:
    """Return the option that records `count` capture ranges and lets the program continue.

    With `:sync` each report is written as its range ends; newer releases otherwise wait for the last range.
    2022.4 takes the suffix but ignores it: all reports are written when the last of the ranges has ended.
    """
    return f"--capture-range-end=repeat:{count}:sync"


def profile(
    script: str | Path,
    *,
    tmp_path: Path,
    options: Sequence[str] = (),
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    check: bool = True,
    own_process: bool = False,
    imports: tuple[str, ...] = (),
) -> Report:
    """Record a Python program, which `tests.support.warm.run` runs.

    Args:
        script: source text, or the path of a file.
        tmp_path: the folder for the reports, with a new folder for each call.
        options: further options of `nsys profile`; a later option wins.
        args: the program's arguments.
        env: further environment variables of the program.
        check: False returns the report of a failed program, with its exit code.
        own_process: nsys starts the program, and so knows the names of its process and threads; slower.
        imports: packages that the program finds imported, besides torch.

    Raises:
        AssertionError: nsys or the program failed.
    """

    def record() -> Report:
        folder = Path(tempfile.mkdtemp(prefix="nsys-", dir=tmp_path))
        fixed: list[str | Path] = ["--trace=nvtx", "--sample=none", "--cpuctxsw=none", "-o", folder / "report"]
        command = [nsys(), "profile", *fixed, *options]
        line = python(program(script, folder), args)
        with alone(), nullcontext(line) if own_process else _stand_in(line, imports) as started:
            done = run([*command, *started], environment(env), check=check, timeout=120)
        files = sorted(folder.glob("*.nsys-rep"), key=lambda path: (len(path.name), path.name))
        return Report(done.returncode, done.stdout, done.stderr, files)

    return recorded(record)


@contextmanager
def _stand_in(command: Sequence[str | Path], imports: tuple[str, ...]) -> Iterator[list[str | Path]]:
    """Yield what nsys is to start in place of `command`, which `warm.run` runs as soon as nsys has done so.

    NVTX itself loads the injection of nsys, into any process that has the variables of a program under nsys.
    """

    def serve() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # nsys has ended without starting anything
            return
        with suppress(BrokenPipeError), connection, connection.makefile("rw") as stream:  # or it ends too soon
            done = warm.run(command, json.loads(stream.readline()), timeout=100, imports=imports)
            answer = {"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
            stream.write(json.dumps(answer) + "\n")

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/socket"
        listener.bind(address)
        listener.listen()
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            try:
                yield [sys.executable, "-E", "-S", Path(__file__).with_name("nsys_stand_in.py"), address]
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                served.result()


def recorded(record: Callable[[], T]) -> T:
    """Return the result of `record`, repeated at most twice if nsys itself fails or hangs, as 2022.4 does."""
    for _ in range(2):
        with suppress(ToolFailed, subprocess.TimeoutExpired):
            return record()
    return record()


@contextmanager
def alone() -> Iterator[None]:
    """Allow one recording at a time on this machine: of concurrent ones, nsys 2022.4 loses one in eighty."""
    with (Path(tempfile.gettempdir()) / "instrument-tests-nsys.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def export(report: Path) -> Path:
    """Return the report as SQLite beside the file; exported once."""
    database = report.with_suffix(".sqlite")
    if not database.exists():
        run([nsys(), "export", "--type", "sqlite", "--output", database, report], environment())
    return database


def ranges(report: Path, *, balanced: bool = True) -> list[Range]:
    """Return every push/pop and start/end range of a report, in order of their starts.

    Args:
        report: a .nsys-rep file, or its .sqlite.
        balanced: False leaves out ranges that have no end, as a capture window may cut them.

    Raises:
        AssertionError: a range has no end.
    """
    found = _read(report, balanced)
    return _with_depth([r for r in found if r.kind != "mark"])


def marks(report: Path) -> list[Range]:
    """Return every instant of a report as a range that ends where it starts."""
    return [r for r in _read(report, balanced=False) if r.kind == "mark"]


def _read(report: Path, balanced: bool) -> list[Range]:
    database = report if report.suffix == ".sqlite" else export(report)
    with closing(sqlite3.connect(database)) as connection:
        connection.row_factory = sqlite3.Row
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'NVTX_EVENTS'").fetchone():
            return []  # tables exist only if they have rows
        rows = connection.execute(
            "SELECT e.*, coalesce(e.text, s.value) AS name, j.value AS json FROM NVTX_EVENTS e "
            "LEFT JOIN StringIds s ON s.id = e.textId LEFT JOIN StringIds j ON j.id = e.jsonTextId "
            "ORDER BY e.start, e.end DESC"
        ).fetchall()

    domains: dict[tuple[int, int], str] = {}
    categories: dict[tuple[int, int, int], str] = {}
    for row in rows:
        process = _process(row["globalTid"])
        if row["eventType"] == DOMAIN:
            domains[process, row["domainId"]] = row["name"]
        elif row["eventType"] == CATEGORY:
            categories[process, row["domainId"], row["category"]] = row["name"]

    found: list[Range] = []
    for row in rows:
        kind = KINDS.get(row["eventType"])
        if kind is None:
            continue
        if row["end"] is None and kind != "mark":
            if balanced:
                raise AssertionError(f"{row['name']!r} has no end in {report}")
            continue
        process, domain, category = _process(row["globalTid"]), row["domainId"], row["category"]
        payloads = (row[column] for column in PAYLOADS)
        end_thread = row["endGlobalTid"] or row["globalTid"]
        found.append(
            Range(
                name=row["name"],
                start=row["start"],
                end=row["start"] if row["end"] is None else row["end"],
                kind=kind,  # type: ignore[arg-type]
                thread=row["globalTid"] & 0xFFFFFF,
                process=process,
                domain=domains.get((process, domain)),
                color=None if row["color"] is None else row["color"] & 0xFFFFFFFF,
                category=categories.get((process, domain, category), category),
                payload=next((value for value in payloads if value is not None), row["json"]),
                end_thread=end_thread & 0xFFFFFF,
            )
        )
    return found


def _process(global_tid: int) -> int:
    return (global_tid >> 24) & 0xFFFFFF


def _with_depth(found: list[Range]) -> list[Range]:
    placed: list[Range] = []

    def walk(nodes: list[Node], depth: int, parent: str | None) -> None:
        for node in nodes:
            placed.append(dataclasses.replace(node.range, depth=depth, parent=parent))
            walk(node.children, depth + 1, node.range.name)

    walk(tree(found), 0, None)
    return sorted(placed, key=lambda r: (r.start, -r.end))
