"""``instrument bisect``: finds the commit that moved a number of ``instrument check``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from ...base.units import counted
from .. import cli

if TYPE_CHECKING:
    from ...explain.contract.numbers import Numbers

_COMMAND = "check"


def bisect(
    commits: str = cli.argument("GOOD..BAD", "A commit before the change, and one after it."),
    command: list[str] = cli.argument("-- check ...", "The check, with its options and its program."),
    number: str | None = cli.option("NAME", "Find the commit that moved this number, such as kernels.gemm."),
) -> None:
    """Find the commit that moved a number of instrument check.

    The commits are checked out one after another into a temporary folder, where this Python runs the check; the
    files here stay as they are: instrument bisect v1.2..HEAD --number kernels -- check --steps 2 -- train.py

    Without --number, it is the first commit for which the check fails, which it must not for GOOD. A commit whose
    program does not run is passed over. Of a branch that was merged, the merge is found.

    The exit code is 0 if the commit is found; 1 if it is one of several; 2 if the commits or the check cannot be
    used; 130 after Ctrl-C and 143 after SIGTERM.
    """
    from ...base.early_stop import ProgramStopper, stop_on_signals
    from ..worktree import Repository

    with cli.errors_reported(unreadable=2):
        options = command[: command.index("--")] if "--" in command else command
        if command[0] != _COMMAND or "--update" in options:
            raise ValueError("what follows -- must be: check, its options without --update, and the program")
        repository = Repository.of_current_folder()
        found = repository.commits(commits)
        with stop_on_signals(ProgramStopper()), repository.worktree() as worktree:

            def measure(commit: str) -> Measured:
                worktree.check_out(commit)
                measured = measured_in(worktree.run(["-m", "instrument", _COMMAND, "--json", *command[1:]]))
                cli.print_message(f"{repository.describe(commit)}: {measured.summary(number)}")
                return measured

            search = Search(found, measure, number)
            low, high = search.run()
        _print(search, low, high, [repository.describe(commit) for commit in found[low + 1 : high + 1]])
    if high - low > 1:
        raise typer.Exit(1)


@dataclass
class Measured:
    """The check of one commit.

    Attributes:
        passed: whether it succeeds.
        numbers: the numbers that were found; None if the program does not run.
        regions: the tree of regions, as text.
        failure: why there are no numbers.
    """

    passed: bool
    numbers: Numbers | None
    regions: str = ""
    failure: str = ""

    def summary(self, number: str | None) -> str:
        """Return a few words on it."""
        if self.numbers is None:
            return f"passed over: {self.failure}"
        if number is not None:
            return f"{number} is {self.numbers.get(number, 0):,}"
        return "the check passes" if self.passed else "the check fails"


def measured_in(result: subprocess.CompletedProcess[str]) -> Measured:
    """Return what a run of ``instrument check --json`` found."""
    from ...explain.contract.numbers import Numbers

    try:
        outcome = json.loads(result.stdout)
    except ValueError:
        lines = result.stderr.strip().splitlines() or ["the check printed nothing"]
        return Measured(False, None, failure=lines[-1].removeprefix("instrument: "))
    if outcome["failure"] is not None:
        return Measured(False, None, failure=outcome["failure"])
    return Measured(result.returncode == 0, Numbers.from_dict(outcome["numbers"]), outcome["regions"])


class Search:
    """A binary search for the first commit that differs.

    Args:
        commits: the commits, the good one first and the bad one last.
        measure: checks one of them.
        number: the name of the number that moved; None for the outcome of the check.
    """

    def __init__(self, commits: list[str], measure: Callable[[str], Measured], number: str | None) -> None:
        self._commits = commits
        self._measure = measure
        self._number = number
        self._known: dict[int, Measured] = {}

    def at(self, index: int) -> Measured:
        """Return the check of a commit, which is made once."""
        if index not in self._known:
            self._known[index] = self._measure(self._commits[index])
        return self._known[index]

    def run(self) -> tuple[int, int]:
        """Return the last commit that is like the good one, and the first one that is not.

        Commits between them could not be checked.

        Raises:
            ValueError: the two ends cannot be told apart.
        """
        low, high = 0, len(self._commits) - 1
        self._check_ends(self.at(low), self.at(high))
        unusable = set[int]()
        while candidates := [index for index in range(low + 1, high) if index not in unusable]:
            middle = min(candidates, key=lambda index: abs(2 * index - low - high))
            if self.at(middle).numbers is None:
                unusable.add(middle)
            elif self._is_bad(self.at(middle)):
                high = middle
            else:
                low = middle
        return low, high

    def _is_bad(self, measured: Measured) -> bool:
        if self._number is None:
            return not measured.passed
        from ...explain.contract.number_file import compare

        good = self.at(0).numbers
        assert measured.numbers is not None and good is not None
        return any(change.name == self._number for change in compare(good, measured.numbers))

    def _check_ends(self, good: Measured, bad: Measured) -> None:
        from ...explain.contract.number_file import compare

        for end, measured in (("GOOD", good), ("BAD", bad)):
            if measured.numbers is None:
                raise ValueError(f"{end} cannot be checked: {measured.failure}")
        assert good.numbers is not None and bad.numbers is not None
        moved = ", ".join(change.name for change in compare(good.numbers, bad.numbers)) or "none"
        name = self._number
        if name is not None and name not in {*good.numbers.names, *bad.numbers.names}:
            raise ValueError(f"unknown number {name}; numbers that moved: {moved}")
        if name is None and not good.passed:
            raise ValueError("the check fails for GOOD already")
        if not self._is_bad(bad):
            what = "the check passes for BAD, too" if name is None else f"{name} is the same at both ends"
            raise ValueError(f"{what}; numbers that moved, for --number: {moved}")


def _print(search: Search, low: int, high: int, commits: list[str]) -> None:
    from ...explain.contract.number_file import compare
    from ...explain.contract.region_tree import RegionTree
    from ...show.terminal.console import new_console, show
    from ...show.terminal.contract import moved_table
    from ...show.text.lines import line

    before, after = search.at(low), search.at(high)
    assert before.numbers is not None and after.numbers is not None
    console = new_console()
    if len(commits) > 1:
        show(console, [f"One of {counted(len(commits), 'commit')}; the others could not be checked:"])
    show(console, [line(commit, "bold") for commit in commits])
    show(console, moved_table(compare(before.numbers, after.numbers)))
    moved = RegionTree.from_text(before.regions).changes(RegionTree.from_text(after.regions))
    show(console, [line(f"- {sentence}") for sentence in moved])


subcommand = cli.subcommand_of(bisect)
