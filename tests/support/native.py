"""Small C libraries that replace the profilers' own and log every call as JSON."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.programs import environment, program, python, run
from tests.support.ranges import Range

SOURCES = Path(__file__).resolve().parents[1] / "native"
Event = dict[str, Any]
Mode = Literal["enabled", "disabled", "no-slot", "init-fails"]
MODES: tuple[Mode, ...] = ("enabled", "disabled", "no-slot", "init-fails")

OPENING = {
    "push": "push_pop",
    "task_begin": "push_pop",
    "start": "start_end",
    "overlapped_begin": "start_end",
}
CLOSING = {"pop": "push_pop", "task_end": "push_pop", "end": "start_end", "overlapped_end": "start_end"}


def build(name: str, *defines: str) -> Path:
    """Compile tests/native/NAME.c, once for each content and set of defines, or skip the test.

    Args:
        name: the source file without its suffix.
        defines: what follows `-D`, such as `NO_EXTENSION` or `LIBRARY_NAME="x"`.
    """
    if not sys.platform.startswith("linux"):
        pytest.skip("the native test libraries are for Linux")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C compiler: {compiler[0]} is not on PATH (set CC)")
    source = SOURCES / f"{name}.c"
    include = [f"-I{nvtx_headers()}"] if "nvtx3/" in source.read_text(encoding="utf-8") else []
    options = [
        "-std=gnu11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        *include,
    ]
    command = [*compiler, *options, *(f"-D{define}" for define in defines), str(source)]
    digest = hashlib.sha256(repr(command).encode())
    for path in (source, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    library = cache_folder() / f"{name}-{digest.hexdigest()[:16]}.so"
    compile_once(library, [*command, "-lpthread"])
    return library


def compile_once(library: Path, command: Sequence[str]) -> None:
    """Run a compiler's command line unless ``library`` is there; a process that is building it is waited for."""
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".partial")  # renamed when it is whole: a build may be interrupted
            done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
            if done.returncode:
                raise AssertionError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
            partial.replace(library)


def cache_folder() -> Path:
    """Return the folder for built libraries, one per user."""
    folder = Path(tempfile.gettempdir()) / f"instrument-native-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise AssertionError(f"{folder} belongs to another user")
    return folder


def nvtx_headers() -> Path:
    """Return the folder that has nvtx3/, from the nvidia-nvtx wheel or a CUDA toolkit, or skip the test."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    candidates = [folder for wheel in wheels for folder in sorted(wheel.glob("*/include"))]
    toolkits = (os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr")
    candidates += [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    for folder in candidates:
        header = folder / "nvtx3" / "nvToolsExtPayload.h"
        if header.exists() and "nvtxDomainIsEnabled" in header.read_text(encoding="utf-8", errors="replace"):
            return folder
    pytest.skip("no NVTX headers: pip install nvidia-nvtx")


def nvtx_log(
    script: str | Path,
    *,
    mode: Mode = "enabled",
    extension: bool = True,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    check: bool = True,
    start: Callable[..., object] = run,
) -> list[Event]:
    """Run a Python program under a logging NVTX tool and return every call that it received.

    Args:
        script: source text, or the path of a file.
        mode: how the tool answers `nvtxDomainIsEnabled`.
        extension: False for a tool that knows NVTX v3 alone.
        env: further environment variables.
        args: the program's arguments.
        check: False takes the log of a program that fails or is killed.
        start: `tests.support.warm.run` for a program that may find torch imported, which saves two seconds.

    Raises:
        AssertionError: the program failed.
    """
    if mode not in MODES:
        raise ValueError(f'"mode" must be one of {", ".join(MODES)}: {mode!r}')
    library = build("nvtxlog") if extension else build("nvtxlog", "NO_EXTENSION")
    tool = {"NVTX_INJECTION64_PATH": str(library), "NVTXLOG_MODE": mode}
    return logged(script, "NVTXLOG", {**tool, **(env or {})}, args, check, start)


def itt_log(
    script: str | Path,
    *,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    check: bool = True,
) -> list[Event]:
    """Run a Python program under a logging ITT collector and return every call that it received."""
    tool = {"INTEL_LIBITTNOTIFY64": str(build("ittlog")), "INTEL_ITTNOTIFY_GROUPS": "all"}
    return logged(script, "ITTLOG", {**tool, **(env or {})}, args, check)


def roctx_log(
    script: str | Path,
    *,
    how: Literal["preload", "ld_library_path"] = "ld_library_path",
    libraries: Sequence[str] = ("libroctx64.so.4",),
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    check: bool = True,
) -> list[Event]:
    """Run a Python program with stand-ins for the rocTX libraries and return every call that they received.

    The `library` of each event is the called library.

    Args:
        script: source text, or the path of a file.
        how: `ld_library_path` leaves the libraries to be found by name; `preload` loads one more before the
            program starts, as a profiler does, whose events are tagged `preload`.
        libraries: the file names that can be found.
        env: further environment variables.
        args: the program's arguments.
        check: False takes the log of a program that fails or is killed.
    """
    with tempfile.TemporaryDirectory() as name:
        for library in libraries:
            (Path(name) / library).symlink_to(build("roctxlog", f'LIBRARY_NAME="{library}"'))
        tool = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [name, os.environ.get("LD_LIBRARY_PATH")]))}
        if how == "preload":
            tool["LD_PRELOAD"] = str(build("roctxlog", 'LIBRARY_NAME="preload"'))
        return logged(script, "ROCTXLOG", {**tool, **(env or {})}, args, check)


def logged(
    script: str | Path, variable: str, env: Mapping[str, str], args: Sequence[str], check: bool,
    start: Callable[..., object] = run,
) -> list[Event]:  # fmt: skip
    """Run the program with `variable` naming a log and return the log's lines."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log.jsonl"
        command = python(program(script, Path(name)), args)
        start(command, environment({**env, variable: str(log)}), check=check)
        text = log.read_text(encoding="utf-8", errors="backslashreplace") if log.exists() else ""
    return [json.loads(line) for line in text.split("\n") if line]


def ranges(events: Iterable[Event], *, balanced: bool = True) -> list[Range]:
    """Pair the events of a log into ranges, in the order in which they began.

    Args:
        events: what `nvtx_log`, `itt_log` or `roctx_log` returned.
        balanced: False leaves out what has no counterpart.

    Raises:
        AssertionError: something was closed that is not open, or is still open at the end.
    """
    stacks: dict[tuple[Any, ...], list[Event]] = {}
    opened: dict[tuple[Any, ...], Event] = {}
    paired: list[Range] = []
    problems: list[str] = []
    for event in events:
        domain = event.get("domain")
        stack = stacks.setdefault((event["pid"], event["tid"], domain), [])
        key = (event["pid"], domain, str(event.get("id")))
        kind = OPENING.get(event["op"]) or CLOSING.get(event["op"])
        if kind is None:
            continue
        if event["op"] in OPENING:
            event = {**event, "depth": len(stack), "parent": stack[-1].get("message") if stack else None}
            if kind == "push_pop":
                stack.append(event)
            else:
                opened[key] = event
            continue
        begun = (stack.pop() if stack else None) if kind == "push_pop" else opened.pop(key, None)
        if begun is None:
            problems.append(f"{event['op']} with nothing open: {event}")
        else:
            paired.append(_range(begun, kind, event))
    problems += [f"never closed: {event}" for stack in stacks.values() for event in stack]
    problems += [f"never closed: {event}" for event in opened.values()]
    if balanced and problems:
        raise AssertionError("the ranges do not balance\n" + "\n".join(problems))
    return sorted(paired, key=lambda r: (r.start, -r.end))


def marks(events: Iterable[Event]) -> list[Range]:
    """Return the instants of a log as ranges that end where they start."""
    return [_range(event, "mark", event) for event in events if event["op"] in ("mark", "marker")]


def _range(begun: Event, kind: Any, ended: Event) -> Range:
    return Range(
        name=begun.get("message"),
        start=begun["t"],
        end=ended["t"],
        kind=kind,
        thread=begun["tid"],
        process=begun["pid"],
        domain=begun.get("domain"),
        color=begun.get("color"),
        category=begun.get("category_name") or begun.get("category"),
        payload=begun.get("payload", begun.get("payload_hex")),
        end_thread=ended["tid"],
        depth=begun.get("depth", 0),
        parent=begun.get("parent"),
    )
