"""scripts/install-chromium.sh: its arguments, and its search for an installed browser; nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT, shell_script

SCRIPT = ROOT / "scripts" / "install-chromium.sh"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("bash") is None, reason="the script is for Linux"
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The only folder on PATH, with an apt-get that installs nothing."""
    folder = tmp_path / "machine"
    shell_script(folder / "apt-get", "echo apt-get was called: $* >&2; exit 1")
    shell_script(folder / "sudo", '"$@"')
    for name in ("env", "id", "sh", "cat"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


def install(machine: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [shutil.which("bash") or "bash", str(SCRIPT), *args]
    env = {**os.environ, "PATH": str(machine)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_help(machine: Path) -> None:
    done = install(machine, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: scripts/install-chromium.sh" in done.stdout


def test_wrong_argument(machine: Path) -> None:
    done = install(machine, "--prefix")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown argument: --prefix" in done.stderr


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_browser_on_path(name: str, machine: Path) -> None:
    """A browser on PATH is enough."""
    shell_script(machine / name, "echo version on PATH")
    done = install(machine)
    assert (done.returncode, done.stdout, done.stderr) == (0, "version on PATH\n", "")


@pytest.mark.parametrize("snap", ["echo Chromium 130.0 snap", "echo install the snap >&2; exit 1"])
def test_snap_on_path(snap: str, machine: Path) -> None:
    """Ubuntu's command that starts a snap is not enough, with or without the snap; another name on PATH is."""
    shell_script(machine / "chromium-browser", snap)
    done = install(machine)
    assert done.returncode == 1
    assert "apt-get was called: -q install -y --no-install-recommends chromium fonts-dejavu-core" in done.stderr
    assert "install-chromium: apt could not install chromium fonts-dejavu-core" in done.stderr
    shell_script(machine / "google-chrome", "echo version on PATH")
    assert install(machine).stdout == "version on PATH\n"


def test_installed_by_apt(machine: Path) -> None:
    """The version of what apt installs is printed; if it does not start, that is an error."""
    shell_script(machine / "apt-get", "exit 0")
    done = install(machine)
    assert (done.returncode, done.stderr) == (1, "install-chromium: the installed chromium does not start\n")
    shell_script(machine / "package", "echo from apt")
    shell_script(
        machine / "apt-get", f'[ "$2" = update ] || {shutil.which("mv")} {machine}/package {machine}/chromium'
    )
    done = install(machine)
    assert (done.returncode, done.stdout) == (0, "from apt\n")


def test_without_apt(machine: Path) -> None:
    """A machine without apt-get gets one sentence that says what to do."""
    (machine / "apt-get").unlink()
    done = install(machine)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "needs a Debian-like machine with apt-get; put chromium or google-chrome on PATH by hand" in line
