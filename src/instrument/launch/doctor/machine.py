"""The machine that the doctor looks at: its files, packages and tools, and what was proved with them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import Distribution
from pathlib import Path

from .. import installed
from ..installed import Tool
from .proofs import NsysProof, TorchProof, prove_nsys, prove_torch

ADMIN, PERFMON, PTRACE = 21, 38, 19
"""Linux capabilities, by their bits."""

_SLOWER = 3  # torch from a network file system: a minute, and more


def _temp() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no folder can be written to
        return Path(os.environ.get("TMPDIR") or "/tmp")


@dataclass
class Machine:
    """This machine, but for what is given; environment variables are those of this process.

    Attributes:
        root: where /proc and /dev are.
        temp: the folder for temporary files.
        out: the folder that traces are to go to.
        packages: where Python looks for installed packages.
        viewer: the address of Perfetto.
        limit_s: how long a profiler may take to record one range.
    """

    root: Path = Path("/")
    temp: Path = field(default_factory=_temp)
    out: Path = Path("runs")
    packages: Sequence[str] = field(default_factory=lambda: sys.path)
    viewer: str = "https://ui.perfetto.dev"
    limit_s: float = 60
    _found: dict[str, Tool | None] = field(default_factory=dict, init=False)

    def text(self, path: str) -> str:
        """Return what is in a file of the system; "" if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """Return the number in a file of the system, such as ``proc/sys/kernel/perf_event_paranoid``."""
        try:
            return int(self.text(path))
        except ValueError:
            return None

    def status(self, name: str) -> str:
        """Return what the system says of this process, such as "CapEff"."""
        lines = (line.partition(":") for line in self.text("proc/self/status").splitlines())
        return next((value.strip() for key, _, value in lines if key == name), "")

    def may(self, *capabilities: int) -> bool:
        """Tell whether this process has one of the Linux capabilities."""
        effective = int(self.status("CapEff") or "0", 16)
        return any(effective >> bit & 1 for bit in capabilities)

    def package(self, name: str) -> str:
        """Return the version of an installed package; "" if it is not installed."""
        found = next(iter(Distribution.discover(name=name, path=list(self.packages))), None)
        return str(found.version) if found else ""

    def tool(self, name: str) -> Tool | None:
        """Return a profiler, as `installed.find` does."""
        if name not in self._found:
            self._found[name] = installed.find(name)
        return self._found[name]

    @property
    def nvidia(self) -> bool:
        """Whether programs here can open an NVIDIA GPU."""
        return (self.root / "dev/nvidiactl").exists() or bool(self.torch.cuda and self.torch.gpus)

    @property
    def amd(self) -> bool:
        """Whether programs here can open an AMD GPU."""
        return (self.root / "dev/kfd").exists() or bool(self.torch.rocm and self.torch.gpus)

    @property
    def container(self) -> bool:
        """Whether this is inside of a container, as far as it shows."""
        return any((self.root / mark).exists() for mark in (".dockerenv", "run/.containerenv")) or bool(
            os.environ.get("KUBERNETES_SERVICE_HOST")
        )

    @cached_property
    def torch(self) -> TorchProof:
        """What torch is, and whether torch.profiler records."""
        return prove_torch(self.temp, _SLOWER * self.limit_s)

    @cached_property
    def nsys(self) -> NsysProof:
        """Whether NVTX ranges arrive in reports of the installed Nsight Systems."""
        tool = self.tool("nsys")
        return (
            prove_nsys(tool.path, self.temp, self.limit_s) if tool else NsysProof(failure="nsys is not installed")
        )
