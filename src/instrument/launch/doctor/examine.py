"""All that the doctor looks at, in the order of the page; one look that fails stops no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from . import gpus, permissions, profilers, settings, software, viewers
from .check import Check
from .machine import Machine

Look = Callable[[Machine], Check | None]

SECTIONS: Mapping[str, Mapping[str, Look]] = {
    "Installed": {
        "instrument": software.instrument,
        "Python": software.python,
        "torch": software.torch,
        "GPU": gpus.gpus,
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
        "CPU sampling": permissions.cpu_sampling,
        "GPU counters": permissions.gpu_counters,
        "ptrace": permissions.ptrace,
        "temporary files": permissions.temp_folder,
        "shared memory": permissions.shared_memory,
        "traces": permissions.out_folder,
    },
    "Environment": {
        "settings": settings.library,
        "under a tool": profilers.now,
        "injected": settings.injected,
        "others": settings.interfering,
    },
    "Viewers": {"Perfetto": viewers.perfetto, "TensorBoard": viewers.tensorboard},
}
"""What to look at, by section and name; None is a look that has nothing to say on this machine."""


class Examined(NamedTuple):
    """A check with its place on the page."""

    section: str
    name: str
    check: Check


def examine(
    machine: Machine,
    sections: Mapping[str, Mapping[str, Look]] = SECTIONS,
    *,
    busy: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Examined]:
    """Look at everything, one after the other.

    Args:
        machine: what to look at.
        sections: the looks.
        busy: called with the name of each look, for a context that is open while it is taken.
    """
    for section, looks in sections.items():
        for name, look in looks.items():
            with busy(name):
                check = _looked(look, machine)
            if check is not None:
                yield Examined(section, name, check)


def _looked(look: Look, machine: Machine) -> Check | None:
    try:
        return look(machine)
    except Exception as error:
        return Check(
            "problem", f"not examined: {type(error).__name__}: {error}", "report this as a bug of instrument"
        )
