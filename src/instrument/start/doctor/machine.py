"""`Machine`: the files, packages, tools and trials that the checks read; `Check`: their outcome."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import Distribution
from pathlib import Path
from typing import Literal

from .. import vendors
from ..vendors import Tool
from .trials import NsysTrial, TorchTrial, try_nsys, try_torch

Status = Literal["ok", "note", "problem", "absent"]
"""A problem is an installed part that is broken or loses ranges; "absent" is a part that is not installed."""

ADMIN, PERFMON, PTRACE = 21, 38, 19
"""Linux capabilities, by their bits."""

_TORCH_FACTOR = 3  # importing torch from a network file system takes a minute and more


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        status: the status.
        sentence: the result, in a sentence.
        fix: a command or a setting that fixes it, if there is one.
        facts: the same as data: versions, and ``proved`` if a trial was made.
    """

    status: Status
    sentence: str
    fix: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


def _temp_folder() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no folder is writable
        return Path(os.environ.get("TMPDIR") or "/tmp")


@dataclass
class Machine:
    """This machine, except for the given parts; environment variables are always those of this process.

    Attributes:
        root: the folder of /proc and /dev.
        temp: the folder for temporary files.
        out: the folder for traces.
        packages: the folders of installed Python packages.
        viewer: the address of Perfetto.
        limit_s: the time limit for a profiler to record one range.
    """

    root: Path = Path("/")
    temp: Path = field(default_factory=_temp_folder)
    out: Path = Path("runs")
    packages: Sequence[str] = field(default_factory=lambda: sys.path)
    viewer: str = "https://ui.perfetto.dev"
    limit_s: float = 60
    _tools: dict[str, Tool | None] = field(default_factory=dict, init=False)

    def text(self, path: str) -> str:
        """Return the text of a system file; "" if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """Return the number in a system file such as ``proc/sys/kernel/perf_event_paranoid``."""
        try:
            return int(self.text(path))
        except ValueError:
            return None

    def status(self, name: str) -> str:
        """Return a value of this process's ``/proc/self/status``, such as "CapEff"."""
        lines = (line.partition(":") for line in self.text("proc/self/status").splitlines())
        return next((value.strip() for key, _, value in lines if key == name), "")

    def has_capability(self, *capabilities: int) -> bool:
        """Return whether this process has one of the Linux capabilities."""
        effective = int(self.status("CapEff") or "0", 16)
        return any(effective >> bit & 1 for bit in capabilities)

    def package(self, name: str) -> str:
        """Return the version of an installed package; "" if it is not installed."""
        installed = next(iter(Distribution.discover(name=name, path=list(self.packages))), None)
        return str(installed.version) if installed else ""

    def tool(self, name: str) -> Tool | None:
        """Return an installed profiler, as `installed.find_tool` does."""
        if name not in self._tools:
            self._tools[name] = vendors.find_tool(name)
        return self._tools[name]

    @property
    def nvidia(self) -> bool:
        """Whether programs can open an NVIDIA GPU."""
        return (self.root / "dev/nvidiactl").exists() or bool(self.torch.cuda and self.torch.gpus)

    @property
    def amd(self) -> bool:
        """Whether programs can open an AMD GPU."""
        return (self.root / "dev/kfd").exists() or bool(self.torch.rocm and self.torch.gpus)

    @property
    def container(self) -> bool:
        """Whether this process appears to run in a container."""
        return any((self.root / mark).exists() for mark in (".dockerenv", "run/.containerenv")) or bool(
            os.environ.get("KUBERNETES_SERVICE_HOST")
        )

    @cached_property
    def torch(self) -> TorchTrial:
        """The build of torch, and whether torch.profiler records."""
        return try_torch(self.temp, _TORCH_FACTOR * self.limit_s)

    @cached_property
    def nsys(self) -> NsysTrial:
        """Whether NVTX ranges arrive in reports of the installed Nsight Systems."""
        tool = self.tool("nsys")
        return try_nsys(tool.path, self.temp, self.limit_s) if tool else NsysTrial(failure="nsys is not installed")
