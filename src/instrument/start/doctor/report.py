"""All checks in order, and their outcome as a page and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from ... import __version__
from ...base.printable import printable
from ...base.units import counted
from ...show.terminal.console import print_line
from . import profilers, software, system
from .machine import Check, Machine, Status

CheckFunction = Callable[[Machine], Check | None]

SECTIONS: Mapping[str, Mapping[str, CheckFunction]] = {
    "Installed": {
        "instrument": software.instrument,
        "Python": software.python,
        "torch": software.torch,
        "GPU": software.gpus,
        "frameworks": software.frameworks,
    },
    "Profilers": {
        "torch.profiler": profilers.torch_profiler,
        "nsys": profilers.nsys,
        "nvtx": profilers.nvtx,
        "ncu": profilers.ncu,
        "rocprof": profilers.rocprof,
        "vtune": profilers.vtune,
    },
    "Permissions and room": {
        "CPU sampling": system.cpu_sampling,
        "GPU counters": system.gpu_counters,
        "ptrace": system.ptrace,
        "temporary files": system.temp_folder,
        "shared memory": system.shared_memory,
        "traces": system.out_folder,
    },
    "Environment": {
        "settings": system.settings,
        "under a tool": profilers.active_profiler,
        "injected": system.injected_libraries,
        "others": system.interfering_settings,
    },
    "Viewers": {"Perfetto": software.perfetto, "TensorBoard": software.tensorboard},
}
"""The checks, by section and name; a check returns None if it does not apply to this machine."""

_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "problem": "bold red", "absent": "dim"}
_LABELS: dict[Status, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM", "absent": "-"}
_STATUS_WIDTH = max(map(len, _LABELS.values())) + 2
_NAME_WIDTH = 17
_MIN_TEXT_WIDTH = 20


class CheckResult(NamedTuple):
    """A check with its place on the page."""

    section: str
    name: str
    check: Check


def examine(
    machine: Machine,
    sections: Mapping[str, Mapping[str, CheckFunction]] = SECTIONS,
    *,
    busy: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> Iterator[CheckResult]:
    """Run the checks one after the other; a check that raises is reported as a problem, and the next ones run.

    Args:
        machine: the machine to check.
        sections: the checks.
        busy: returns, for the name of each check, a context that is open while it runs.
    """
    for section, checks in sections.items():
        for name, function in checks.items():
            with busy(name):
                try:
                    check = function(machine)
                except Exception as error:
                    sentence = f"not checked: {type(error).__name__}: {error}"
                    check = Check("problem", sentence, "report this as a bug of instrument")
            if check is not None:
                yield CheckResult(section, name, check)


def render(results: Iterable[CheckResult], *, console: Console) -> list[CheckResult]:
    """Print each check as it comes, then a conclusion; return all of them."""
    shown: list[CheckResult] = []
    for item in results:
        if not shown or shown[-1].section != item.section:
            print_line(console, item.section, bold=True, space=bool(shown))
        _print(item, console)
        shown.append(item)
    print_line(console, _conclusion(shown), bold=True, space=True)
    return shown


def _print(item: CheckResult, console: Console) -> None:
    status = item.check.status
    column = _STATUS_WIDTH + _NAME_WIDTH
    text = textwrap.wrap(
        printable(" ".join(item.check.sentence.split())),
        max(console.width - column, _MIN_TEXT_WIDTH),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
    label = (_LABELS[status].ljust(_STATUS_WIDTH), _STYLES[status])
    console.print(Text.assemble(label, item.name.ljust(_NAME_WIDTH), text[0]), soft_wrap=True)
    for rest in text[1:]:
        print_line(console, " " * column + rest)
    if item.check.fix:  # on one line, to be copied
        print_line(console, f"{' ' * _STATUS_WIDTH}fix: {item.check.fix}")


def _conclusion(shown: Sequence[CheckResult]) -> str:
    problems, notes = (sum(item.check.status == status for item in shown) for status in ("problem", "note"))
    noted = f", {counted(notes, 'note')}" if notes else ""
    if problems:
        return f"{counted(problems, 'problem')}{noted}."
    if any(item.name == "torch" and item.check.status == "absent" for item in shown):
        return f"No problem{noted}: traces can be read here; recording needs torch."
    return f"No problem{noted}: everything installed records here."


def to_json(results: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the checks as data for JSON."""
    return {
        "instrument": __version__,
        "problems": problems(results),
        "checks": [{"section": section, "name": name, **asdict(check)} for section, name, check in results],
    }


def problems(results: Sequence[CheckResult]) -> int:
    """Return the number of problems."""
    return sum(item.check.status == "problem" for item in results)
