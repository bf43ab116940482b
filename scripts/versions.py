"""Runs the fast tests and the demo with other versions of Python, torch and the dependencies.

``python -m scripts.versions 3.10:2.6.0 3.13:2.9.1`` takes pairs of Python and torch; ``--floors`` installs the
oldest version of each dependency that pyproject.toml accepts. Each pair has an environment of its own in
build/versions, which is removed afterwards: a CUDA build of torch takes 6 GB. A Python is of pyenv or on PATH.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "versions"
_REQUIREMENT = re.compile(r"^([\w-]+)(?:\[.*\])?>=([\w.]+)")


def requirements() -> list[str]:
    """Return the dependencies that pyproject.toml names, without extras."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def floors(required: Iterable[str]) -> list[str]:
    """Return constraints that choose the oldest version that each requirement accepts."""
    found = {requirement: _REQUIREMENT.match(requirement) for requirement in required}
    without = [requirement for requirement, match in found.items() if match is None]
    if without:
        raise ValueError(f'a requirement must begin with "NAME>=VERSION": {", ".join(without)}')
    return [f"{match[1]}=={match[2]}" for match in found.values() if match is not None]


def interpreter(version: str) -> str:
    """Return the path of a Python, as "3.10"."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = sorted(home.glob(f"versions/{version}.*/bin/python"))
    found = str(kept[-1]) if kept else shutil.which(f"python{version}")
    if found is None:
        raise SystemExit(f"there is no Python {version} on PATH and none in {home}")
    return found


def install(place: Path, python: str, torch: str, constraints: list[str]) -> None:
    """Make the environment of a pair; with constraints, without the extras, which may need newer versions."""
    subprocess.run([interpreter(python), "-m", "venv", "--clear", place], check=True)
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)  # that of Python 3.10 looks for versions for minutes
    (place / "constraints.txt").write_text("\n".join([f"torch=={torch}", *constraints]))
    what = ".[test-tools]" if constraints else ".[remote,test-tools,traces]"
    subprocess.run([*pip, "--constraint", place / "constraints.txt", "--editable", what], cwd=ROOT, check=True)
    for mark in (".installed", ".installed-test"):
        (place / mark).touch()  # so that make installs nothing


def run(target: str, place: Path) -> tuple[int, str]:
    """Run a target of the Makefile in an environment, show its output, and return its code and its last line."""
    command = ["make", "--no-print-directory", target, f"VENV={place}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        last = ""
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last


def check(pair: str, constraints: list[str]) -> tuple[bool, str]:
    """Return whether the tests and the demo pass with a pair, and its row of a table."""
    python, _, torch = pair.partition(":")
    place = FOLDER / pair.replace(":", "-")
    try:
        install(place, python, torch, constraints)
        demo, _ = run("demo", place)
        tests, counts = run("test-fast", place)
        versions = "import platform, torch; print(platform.python_version(), torch.__version__, sep=' | ')"
        shown = subprocess.run(
            [place / "bin" / "python", "-c", versions], capture_output=True, text=True, check=True
        )
        return not (demo or tests), f"| {shown.stdout.strip()} | {counts} | {'failed' if demo else 'passed'} |"
    except subprocess.CalledProcessError as error:
        return False, f"| {python} | {torch} | not installed: {error} | |"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    """Check each pair, print a table, and exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", metavar="PYTHON:TORCH")
    parser.add_argument("--floors", action="store_true", help="install the oldest dependencies")
    given = parser.parse_args()
    constraints = floors(requirements()) if given.floors else []
    results = [check(pair, constraints) for pair in given.pairs]
    print("| Python | torch | tests | demo |\n|---|---|---|---|", *(row for _, row in results), sep="\n")
    raise SystemExit(not all(passed for passed, _ in results))


if __name__ == "__main__":
    main()
