"""Commits of a git repository, and a temporary copy of its files in which other commits are checked out."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.guard import uninterrupted

_WITHOUT_HOOKS = ("-c", f"core.hooksPath={os.devnull}", "-c", "advice.detachedHead=false")
_SOURCES = "src"  # the folder of the packages of many projects


@dataclass(frozen=True)
class Repository:
    """The repository of a folder.

    Attributes:
        root: its outermost folder.
        inside: the path of the current folder in it.
    """

    root: Path
    inside: Path

    @classmethod
    def of_current_folder(cls) -> Repository:
        """Return the repository of the current folder.

        Raises:
            ValueError: there is none with files, it is a shallow clone, or git is not installed.
        """
        current = Path.cwd().resolve()
        root = Path(git(current, "rev-parse", "--show-toplevel")).resolve()
        if git(root, "rev-parse", "--is-shallow-repository") == "true":
            raise ValueError("the repository is a shallow clone, which lacks commits: git fetch --unshallow")
        return cls(root, current.relative_to(root))

    def commits(self, given: str) -> list[str]:
        """Return the commits of a range GOOD..BAD, from GOOD on; a branch that was merged is its one merge.

        Raises:
            ValueError: the range cannot be searched.
        """
        good, dots, bad = given.partition("..")
        if not dots or not good or bad.startswith("."):
            raise ValueError(f"the commits must be GOOD..BAD, such as v1.2..HEAD: {given}")
        first, last = self._commit(good), self._commit(bad or "HEAD")
        if first == last:
            raise ValueError(f"there is no commit between {good} and {bad or 'HEAD'}: they are the same")
        if not self._is_ancestor(first, last):
            raise ValueError(f"{good} is not an ancestor of {bad or 'HEAD'}")
        changed = git(self.root, "status", "--porcelain", "--untracked-files=no")
        if changed and last == self._commit("HEAD"):
            file = changed.split("\n")[0][2:].strip()
            raise ValueError(f"{file} has changes that are in no commit: commit or stash them")
        return [first, *git(self.root, "rev-list", "--first-parent", "--reverse", f"{first}..{last}").split()]

    def _commit(self, name: str) -> str:
        try:
            return git(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        except ValueError:
            raise ValueError(f"there is no commit {name}") from None

    def _is_ancestor(self, first: str, last: str) -> bool:
        try:
            git(self.root, "merge-base", "--is-ancestor", first, last)
        except ValueError:
            return False
        return True

    def describe(self, commit: str) -> str:
        """Return the short name of a commit, its subject, its author and its date."""
        return git(self.root, "log", "-1", "--format=%h %s (%an, %as)", commit)

    @contextlib.contextmanager
    def worktree(self) -> Iterator[Worktree]:
        """Yield a temporary copy of the files of the repository, which is removed at the end, also at Ctrl-C.

        Raises:
            ValueError: git fails.
        """
        folder = Path(tempfile.mkdtemp(prefix="instrument-bisect-")).resolve()
        path = folder / self.root.name
        try:
            git(self.root, *_WITHOUT_HOOKS, "worktree", "add", "--quiet", "--detach", str(path), "HEAD")
            yield Worktree(self, path)
        finally:
            with uninterrupted():
                with contextlib.suppress(ValueError):
                    git(self.root, "worktree", "remove", "--force", "--force", str(path))
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(ValueError):
                    git(self.root, "worktree", "prune")


@dataclass(frozen=True)
class Worktree:
    """A temporary copy of the files of a repository.

    Attributes:
        repository: the repository.
        path: the outermost folder of the copy.
    """

    repository: Repository
    path: Path

    def check_out(self, commit: str) -> None:
        """Make the files those of a commit, without what programs wrote beside them.

        Raises:
            ValueError: git fails.
        """
        git(self.path, *_WITHOUT_HOOKS, "checkout", "--quiet", "--force", "--detach", commit)
        git(self.path, "clean", "-ffdxq")

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run Python, with this interpreter, in the copy of the current folder.

        Args:
            command: the arguments of Python; paths into the repository become those into the copy, and the other
                way round in what it prints.
        """
        folder = self.path / self.repository.inside
        if not folder.is_dir():
            return subprocess.CompletedProcess(command, 2, "", f"there is no folder {self.repository.inside}")
        words = [str(self._moved(word)) if Path(word).is_absolute() else word for word in command]
        done = run_python(words, folder, self._environment())
        copy, own = str(self.path), str(self.repository.root)
        done.stdout, done.stderr = done.stdout.replace(copy, own), done.stderr.replace(copy, own)
        return done

    def _moved(self, path: str | Path) -> Path:
        """Return the path of a file of the repository in the copy; of another file its own."""
        file = Path(path)
        inside = file.is_relative_to(self.repository.root)
        return self.path / file.relative_to(self.repository.root) if inside else file

    def _environment(self) -> dict[str, str]:
        """Return an environment in which Python imports the project's packages from the copy."""
        own = Path(__file__).parents[2]  # of this package, which stays the same
        given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        folders = {Path(entry).resolve() for entry in (*sys.path, *given) if entry}
        inside = {folder for folder in folders if folder.is_relative_to(self.repository.root)} - {own}
        moved = [self.path / _SOURCES, *sorted(map(self._moved, inside))]
        outside = [entry for entry in given if Path(entry).resolve() not in inside]
        path = dict.fromkeys([*(str(folder) for folder in moved if folder.is_dir()), *outside])
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return kept | {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}


def run_python(words: Sequence[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, and return what it printed."""
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints.

    Raises:
        ValueError: it fails, or is not installed; with the first line of its message.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=folder, env=kept, capture_output=True, text=True, start_new_session=True
        )
    except FileNotFoundError:
        raise ValueError("git is not installed") from None
    if result.returncode:
        message = result.stderr.strip().splitlines() or [f"git {arguments[0]} fails"]
        raise ValueError(message[0].removeprefix("fatal: "))
    return result.stdout.strip("\n")
