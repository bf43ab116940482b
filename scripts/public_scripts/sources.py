"""Finds a public repository at a commit: in a folder of clones, or on GitHub."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

VARIABLE = "PUBLIC_SCRIPTS"
TIME_LIMIT_S = 600  # for each call of git


class MissingError(Exception):
    """A script cannot be run; the message is a sentence that says what is missing."""


def _git(*args: str | Path) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-c", "safe.directory=*", *map(str, args)]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        return subprocess.run(command, capture_output=True, env=environment, timeout=TIME_LIMIT_S)
    except FileNotFoundError:
        raise MissingError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise MissingError(f"git {args[2]} did not end within {TIME_LIMIT_S} s") from None


def _candidates(folder: Path, repository: str) -> Iterator[Path]:
    """Yield where `repository` may be below `folder`: at OWNER/NAME or OWNER+NAME, bare or not."""
    for name in (repository, repository.replace("/", "+")):
        for place in (name, f"{name}.git", f"{name}/repo", f"{name}/repo.git"):
            yield folder / place / ".git"
            yield folder / place


def find(folder: Path, repository: str) -> Path:
    """Return the git directory of `repository` below `folder`.

    Raises:
        MissingError: there is none.
    """
    for place in _candidates(folder, repository):
        if (place / "HEAD").is_file() and (place / "objects").is_dir():
            return place
    owner, _, name = repository.partition("/")
    raise MissingError(
        f"{VARIABLE}={folder} has no clone of {repository}: put one at {owner}/{name} or {owner}+{name}"
    )


def _fetch(repository: str, commit: str, cache: Path) -> Path:
    """Fetch one commit from GitHub into a bare repository below `cache`, once."""
    place = cache / f"{repository}.git"
    if not (place / "HEAD").is_file():
        _git("init", "--quiet", "--bare", place)
    if _git("--git-dir", place, "cat-file", "-e", f"{commit}^{{commit}}").returncode:
        url = f"https://github.com/{repository}"
        done = _git("--git-dir", place, "fetch", "--quiet", "--depth", "1", url, commit)
        if done.returncode:
            said = (done.stderr.decode(errors="replace").strip().splitlines() or ["git said nothing"])[0]
            raise MissingError(f"{url} could not be fetched ({said}); set {VARIABLE} to a folder that has clones")
    return place


def check_out(repository: str, commit: str, parts: Sequence[str], target: Path, cache: Path) -> None:
    """Write `parts` of `repository` at `commit` into the empty folder `target`.

    Raises:
        MissingError: the repository or the commit cannot be had.
    """
    folder = os.environ.get(VARIABLE)
    place = find(Path(folder).expanduser(), repository) if folder else _fetch(repository, commit, cache)
    if _git("--git-dir", place, "cat-file", "-e", f"{commit}^{{commit}}").returncode:
        raise MissingError(f"{place} does not have commit {commit[:12]} of {repository}: fetch it there")
    done = _git("--git-dir", place, "archive", commit, "--", *parts)
    done.check_returncode()
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        if hasattr(tarfile, "data_filter"):  # from Python 3.10.12 and 3.11.4 on
            archive.extractall(target, filter="data")
        else:
            archive.extractall(target)
