"""scripts/install-nsys.sh: its arguments, and its search for an installed nsys; nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT, shell_script

SCRIPT = ROOT / "scripts" / "install-nsys.sh"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("bash") is None, reason="the script is for Linux"
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with an nsys and an apt-get that has no packages, both first on PATH."""
    folder = tmp_path / "machine"
    shell_script(folder / "nsys", "echo version on PATH")
    shell_script(folder / "apt-get", "echo apt-get was called >&2; exit 1")
    return folder


def install(machine: Path, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSYS_")}
    clean["PATH"] = f"{machine}:{clean['PATH']}"
    command = ["bash", str(SCRIPT), *map(str, args)]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=60, cwd=machine)


def installed(prefix: Path, name: str = "1.0") -> Path:
    """Write a tree as the script installs it."""
    return shell_script(prefix / name / "usr/lib/nsight-systems/target-linux-x64/nsys", "echo version in prefix")


def test_help(machine: Path) -> None:
    done = install(machine, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--prefix FOLDER" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prefx", "/x"], "unknown argument: --prefx"),
        (["/x"], "unknown argument: /x"),
        (["--prefix"], "--prefix needs a folder"),
        (["--bin="], "--bin needs a folder, got ''"),
        (["--prefix", "--bin"], "--prefix needs a folder, got '--bin'"),
    ],
)
def test_wrong_arguments(args: list[str], message: str, machine: Path) -> None:
    done = install(machine, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_nsys_on_path(machine: Path) -> None:
    """Without a chosen folder, the nsys on PATH is enough."""
    done = install(machine)
    assert (done.returncode, done.stdout, done.stderr) == (0, "version on PATH\n", "")


@pytest.mark.parametrize("how", ["option", "option with =", "environment", "relative"])
def test_chosen_prefix(how: str, machine: Path, tmp_path: Path) -> None:
    """A chosen prefix counts although there is an nsys on PATH; the link is in its bin folder."""
    prefix = tmp_path / "prefix"
    nsys = installed(prefix)
    args, env = {
        "option": (["--prefix", prefix], {}),
        "option with =": ([f"--prefix={prefix}"], {}),
        "environment": ([], {"NSYS_PREFIX": str(prefix)}),
        "relative": (["--prefix", "../prefix"], {}),
    }[how]
    done = install(machine, *args, **env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"version in prefix\ninstall-nsys: add {prefix}/bin to PATH\n"
    assert (prefix / "bin" / "nsys").resolve() == nsys


def test_chosen_bin(machine: Path, tmp_path: Path) -> None:
    """The link is in the chosen folder, and replaces an existing nsys."""
    nsys = installed(tmp_path / "prefix")
    shell_script(tmp_path / "bin" / "nsys", "echo another")
    done = install(machine, "--bin", tmp_path / "bin", "--prefix", tmp_path / "prefix")
    assert done.returncode == 0
    assert (tmp_path / "bin" / "nsys").resolve() == nsys


def test_empty_prefix_is_installed_into(machine: Path, tmp_path: Path) -> None:
    """For an empty prefix, or one with an interrupted installation, the nsys on PATH is not enough."""
    installed(tmp_path / "prefix", name="1.0.partial")
    if shutil.which("dpkg-deb") is None:
        pytest.skip("apt-get is used on Debian and Ubuntu only")
    done = install(machine, "--prefix", tmp_path / "prefix")
    assert done.returncode == 1
    assert "apt-get was called" in done.stderr
    assert "version" not in done.stdout
