"""Jobs of several ranks: rewrites the command line of a launcher such as torchrun to run each rank under the tool.

One tool around the launcher would merge the windows of all ranks or lose some, as each rank would begin and end
its recording.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}


@dataclass(frozen=True)
class Workers:
    """The parts of a launcher's command line.

    Attributes:
        launcher: the launcher with its options.
        program: the program that it starts for each rank.
        restarts: whether it may restart a rank.
    """

    launcher: Sequence[str]
    program: Sequence[str]
    restarts: bool

    def under(self, tool: Sequence[str]) -> list[str]:
        """Return the command line that starts each rank under ``tool``."""
        return [*self.launcher, "--no_python", *tool, *self.program]


def workers(command: Sequence[str], environment: Mapping[str, str]) -> Workers | None:
    """Parse the command line of torchrun or ``accelerate launch``; return None for another or a wrong one."""
    words, name = list(command), Path(command[0]).name
    if name == "torchrun":
        start = 1
    elif name == "accelerate" and words[1:2] == ["launch"]:
        start = 2
    elif words[1:2] == ["-m"] and words[2:3] and words[2] in _MODULES:
        name, start = _MODULES[words[2]], 3
    else:
        return None
    given = words[start:]
    parsed = _parse(name, given)
    if parsed is None or not parsed.training_script:
        return None
    own = len(given) - len(parsed.training_script_args) - 1
    # After "--" the next word would be taken for the script.
    options = [word for word in given[:own] if word not in ("-m", "--module", "--no_python", "--no-python", "--")]
    program = given[own:]
    if not parsed.no_python:
        python = environment.get("PYTHON_EXEC", sys.executable)  # as torchrun does
        program = [python, "-u", *(["-m"] if parsed.module else []), *program]
    restarts = int(getattr(parsed, "max_restarts", 0) or 0) > 0
    return Workers([*words[:start], *options], program, restarts)


def _parse(launcher: str, words: list[str]) -> Any:
    """Return the launcher's arguments as its own parser parses them; None if it rejects them."""
    try:
        if launcher == "torchrun":
            module, name = "torch.distributed.run", "get_args_parser"
        else:
            module, name = "accelerate.commands.launch", "launch_command_parser"
        parser = getattr(importlib.import_module(module), name)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return parser().parse_args(words)
    except (ImportError, SystemExit):  # the launcher will report the error
        return None
