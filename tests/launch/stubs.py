"""Stubs of the vendors' tools, which record how they were called, run the program, and write a report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from instrument.start.vendors import LaunchRequest
from tests.support.programs import environment, run

STUB = """#!{python}
import json, os, shutil, subprocess, sys
from pathlib import Path

words, environ = sys.argv[1:], dict(os.environ)
name = Path(sys.argv[0]).name
if "--version" in words:
    print("version " + {version!r})
    sys.exit()
if "--help" in words:
    print({help!r})
    sys.exit()
if "-report" in words:
    print("Elapsed Time: 1.0s")
    sys.exit()
if words[0] == "export":
    shutil.copyfile(words[-1], next(word for word in words if word.startswith("--output=")).partition("=")[2])
    sys.exit()
at = 1 if name == "nsys" else 0
flags = ("--nvtx",)
while words[at].startswith("-") and words[at] != "--":
    alone = "=" in words[at] or words[at] in flags or (name in ("rocprofv3", "vtune") and words[at] not in (
        "-f", "-d", "-o", "-collect", "-r"))
    at += 1 if alone else 2
own, program = words[:at], words[at + (words[at] == "--"):]
environ.update({variables!r})
code = subprocess.run(program, env=environ).returncode
code = code if code >= 0 else 128 - code
with open({log!r}, "a") as log:
    log.write(json.dumps({{"tool": name, "own": own, "program": program}}) + "\\n")
report = {report!r}
if report is not None:
    at = own.index("-r" if name == "vtune" else "-o") + 1
    path = own[at] if "-d" not in own else os.path.join(own[own.index("-d") + 1], own[at])
    path = path.replace("%pid%", str(os.getpid())).replace("%env{{RANK}}%", environ.get("RANK", ""))
    path = path.replace("%q{{RANK}}", environ.get("RANK", "")) + {suffix!r}
    if name == "vtune":
        os.mkdir(path)
    else:
        shutil.copyfile(report, path)
sys.exit(code)
"""

SUFFIX = {"nsys": ".nsys-rep", "ncu": ".ncu-rep", "rocprofv3": "_results.db", "vtune": ""}


@dataclass
class Stub:
    """A stub on ``PATH``."""

    folder: Path
    log: Path

    def environment(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a process that finds the stub before any other tool."""
        env = environment(extra)
        return env | {"PATH": f"{self.folder}{os.pathsep}{env['PATH']}"}

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Return the calls of the stub, each with its own options and the program."""
        return [json.loads(text) for text in self.log.read_text().splitlines()]


def stub(
    tmp_path: Path,
    tool: str,
    *,
    version: str = "2024.1.0",
    help: str = "",
    report: Path | None = None,
    variables: dict[str, str] | None = None,
) -> Stub:
    """Write an executable called ``tool``.

    Args:
        tmp_path: the folder for the executable and its log.
        tool: its file name.
        version: the version that it prints for ``--version``.
        help: the text that it prints for ``--help``.
        report: the file that it copies as its report; None writes no report.
        variables: the variables that it adds to the environment of the program.
    """
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    installed = Stub(folder, tmp_path / f"{tool}.jsonl")
    text = STUB.format(
        python=sys.executable, version=version, help=help, variables=variables or {}, log=str(installed.log),
        report=report and str(report), suffix=SUFFIX[tool],
    )  # fmt: skip
    (folder / tool).write_text(text)
    (folder / tool).chmod(0o755)
    return installed


def request(tmp_path: Path, *words: str, windows: int | None = 2, **others: Any) -> LaunchRequest:
    """Return a request; the program is ``python train.py``."""
    others.setdefault("environment", dict(os.environ))
    return LaunchRequest(
        command=words or (sys.executable, "train.py"), out=tmp_path / "out", windows=windows, **others
    )


LAUNCH = """
import json, os, sys
from pathlib import Path
from instrument.start.launch import LaunchRequest, launch

arguments = json.loads(sys.argv[2])
arguments["out"] = Path(arguments["out"])
sys.exit(launch(sys.argv[1], LaunchRequest(environment=dict(os.environ), **arguments)))
"""


def launching(profiler: str, folder: Path, command: Sequence[str | Path], **others: Any) -> list[str]:
    """Return the command line of a process that launches ``command``."""
    arguments = {"command": [str(word) for word in command], "out": str(folder), "windows": 2, **others}
    return [sys.executable, "-c", LAUNCH, profiler, json.dumps(arguments)]


def launched(
    profiler: str, folder: Path, command: Sequence[str | Path], env: dict[str, str], **others: Any
) -> Any:
    """Launch ``command`` in a separate process."""
    return run(launching(profiler, folder, command, **others), {**env, "COLUMNS": "100"}, check=False)


@pytest.fixture
def without_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables that make this process a rank of a job."""
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PYTHON_EXEC"):
        monkeypatch.delenv(variable, raising=False)
