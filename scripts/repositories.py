"""Reads files of public repositories at a commit, from a folder of clones or from GitHub."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

GITHUB = "https://github.com"
TIME_LIMIT_S = 600  # for each call of git


class MissingError(Exception):
    """A repository, a commit or a file is missing; the message names it and says what to do."""


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
    """Yield the possible places of `repository` below `folder`: OWNER/NAME or OWNER+NAME, bare or not."""
    for name in (repository, repository.replace("/", "+")):
        for place in (name, f"{name}.git", f"{name}/repo", f"{name}/repo.git"):
            yield folder / place / ".git"
            yield folder / place


def find(variable: str, folder: Path, repository: str) -> Path:
    """Return the git directory of `repository` below `folder`, which the environment's `variable` names.

    Raises:
        MissingError: the folder has no clone of it.
    """
    for place in _candidates(folder, repository):
        if (place / "HEAD").is_file() and (place / "objects").is_dir():
            return place
    owner, _, name = repository.partition("/")
    raise MissingError(
        f"{variable}={folder} has no clone of {repository}: put one at {owner}/{name} or {owner}+{name}"
    )


def _fetch(variable: str, repository: str, commit: str, cache: Path, whole: bool) -> Path:
    """Fetch one commit into a bare repository below `cache`, once."""
    place = cache / f"{repository}.git"
    url = f"{GITHUB}/{repository}"
    if not (place / "HEAD").is_file():
        _git("init", "--quiet", "--bare", place)
    kept = (
        f"refs/fetched/{commit}"  # `cat-file -e` would fetch a commit that a partial clone lacks, with its history
    )
    if _git("--git-dir", place, "rev-parse", "--quiet", "--verify", kept).returncode:
        source, options = url, ["--quiet", "--depth", "1"]
        if not whole:
            for key, value in (("url", url), ("promisor", "true")):
                _git("--git-dir", place, "config", f"remote.origin.{key}", value)
            source, options = "origin", [*options, "--filter", "blob:none"]
        done = _git("--git-dir", place, "fetch", *options, source, f"{commit}:{kept}")
        if done.returncode:
            first_line = (done.stderr.decode(errors="replace").strip().splitlines() or ["git printed nothing"])[0]
            raise MissingError(
                f"{url} could not be fetched ({first_line}); set {variable} to a folder that has clones"
            )
    return place


def locate(variable: str, repository: str, commit: str, cache: Path, whole: bool = True) -> Path:
    """Return a git directory that has `commit` of `repository`.

    Args:
        variable: the environment variable that names a folder of clones; unset means GitHub.
        repository: OWNER/NAME.
        commit: the full hash.
        cache: the folder for commits fetched from GitHub.
        whole: fetch all files of the commit at once; if not, git fetches each file when it is read.

    Raises:
        MissingError: the repository or the commit is missing.
    """
    folder = os.environ.get(variable)
    if not folder:
        return _fetch(variable, repository, commit, cache, whole)
    place = find(variable, Path(folder).expanduser(), repository)
    if _git("--git-dir", place, "cat-file", "-e", f"{commit}^{{commit}}").returncode:
        raise MissingError(f"{place} does not have commit {commit[:12]} of {repository}: fetch it there")
    return place


def read_file(place: Path, commit: str, path: str) -> bytes:
    """Return the content of the file at `path` of `commit`.

    Raises:
        MissingError: the commit has no such file, or it could not be fetched.
    """
    done = _git("--git-dir", place, "cat-file", "blob", f"{commit}:{path}")
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()
        raise MissingError(f"{place} does not have {path} at {commit[:12]}: {message}")
    return done.stdout


def check_out(place: Path, commit: str, parts: Sequence[str], target: Path) -> None:
    """Write `parts` of `commit` into the empty folder `target`."""
    done = _git("--git-dir", place, "archive", commit, "--", *parts)
    done.check_returncode()
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        if hasattr(tarfile, "data_filter"):  # from Python 3.10.12 and 3.11.4 on
            archive.extractall(target, filter="data")
        else:
            archive.extractall(target)
