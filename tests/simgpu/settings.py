"""The settings of the simulated GPU: what each means, in which unit, and what it accepts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Value = int | float | bool | str | os.PathLike[str] | Mapping[str, int] | Mapping[int, float]


@dataclass(frozen=True)
class Setting:
    """One setting: SIMGPU_NAME in the environment, or a keyword of `configure`."""

    name: str
    default: str
    meaning: str
    accepts: str = "a whole number from 0, of at most 18 digits"
    pattern: str = r"\d{1,18}"
    at_start_only: bool = False

    def text(self, value: Value) -> str:
        """Return a value as the libraries read it.

        Raises:
            ValueError: the setting doesn't accept it.
        """
        if isinstance(value, Mapping):
            text = ",".join(f"{key}={number}" for key, number in value.items())
        else:
            text = str(int(value)) if isinstance(value, bool) else str(value)
        if not re.fullmatch(self.pattern, text):
            raise ValueError(f'"{self.name.lower()}" must be {self.accepts}: {value!r}')
        return text


def choice(name: str, meaning: str, *values: str) -> Setting:
    quoted = " or ".join(f'"{value}"' for value in ("", *values))
    return Setting(name, "", meaning, quoted, "|".join(("", *values)))


def kernel(name: str, meaning: str) -> Setting:
    return Setting(name, "", meaning, "a part of a kernel's mangled name, empty for none", ".*")


def flag(name: str, meaning: str) -> Setting:
    return Setting(name, "0", meaning, "0 or 1", "[01]")


SETTINGS = (
    # the machine
    Setting("DEVICES", "1", "how many GPUs there are", "1 to 16", "[1-9]|1[0-6]", at_start_only=True),
    Setting("NAME", "Simulated GPU", "the name of each", "a text", ".+"),
    Setting("MEMORY", "85899345920", "the memory of each, in bytes"),
    Setting("SHARED", "", "the file by which processes share the memory of the GPUs; each has its own without",
            "a path", ".*", at_start_only=True),
    choice("DEVICE", "why no context can be made: another process has the GPU alone, or filled its memory",
           "exclusive", "full"),
    # time
    Setting("KERNEL_NS", "2500", "how long a kernel takes at least, in ns"),
    Setting("BLOCK_PS", "5000", "how long each block of a kernel's grid takes, in ps"),
    Setting("DURATIONS", "", "how long kernels take whose mangled names contain a part, in ns; the last one holds",
            'PART=NS,... or a dict {"gemm": 100_000}', r"(.+=\d+(,.+=\d+)*)?"),
    Setting("GFLOPS", "50000", "the rate of matmuls in 32 and 64 bits, in GFLOP/s (operations per ns)"),
    Setting("HALF_GFLOPS", "600000", "the rate of matmuls in fewer bits, in GFLOP/s (operations per ns)"),
    Setting("SLOW", "", "the factor by which the kernels of a device take longer",
            "DEVICE=FACTOR,... or a dict {1: 2.5}", r"(\d+=\d+(\.\d+)?(,\d+=\d+(\.\d+)?)*)?"),
    Setting("NCCL_NS", "15000", "how long a collective takes at least from the start of its last rank, in ns"),
    Setting("NCCL_GBS", "200", "the rate of collectives and of send and receive, in GB/s (bytes per ns)"),
    Setting("NCCL_INIT_NS", "60000000000", "how long a new communicator waits for its ranks, in ns"),
    Setting("LAUNCH_NS", "1500", "how long the CPU is busy with a launch, in ns"),
    Setting("LATENCY_NS", "5000", "how long after its call a work starts at the earliest, in ns"),
    Setting("GAP_NS", "1000", "how long a stream rests between two works, in ns; half of it in a graph"),
    Setting("QUEUE", "1024", "how many works a stream holds before a launch waits",
            "a whole number from 1, of at most 18 digits", r"[1-9]\d{,17}"),
    Setting("COPY_NS", "1500", "how long a memcpy or memset takes at least, in ns"),
    Setting("PINNED_GBS", "25", "the rate of copies from and to pinned memory, in GB/s (bytes per ns)"),
    Setting("PAGEABLE_GBS", "8", "the rate of copies from and to pageable memory, in GB/s (bytes per ns)"),
    Setting("DEVICE_GBS", "1500", "the rate of copies and fills on the device, in GB/s (bytes per ns)"),
    Setting("STAGED_BYTES", "65536", "up to how many bytes a copy from pageable memory does not wait"),
    # faults
    kernel("ASSERT", "the kernel that raises a device-side assertion"),
    kernel("HANG", "the kernel that never ends"),
    Setting("ERROR_AT_LAUNCH", "0", "which launch of the process is an illegal memory access; 0 for none"),
    Setting("LARGEST_BYTES", "0",
            "above how many bytes free memory is too fragmented, but in expandable segments; 0 for none"),
    choice("CUPTI", "why CUPTI cannot be used: no rights, or another tool has it", "refused", "busy"),
    flag("LOST_RECORDS", "recording k of a process loses the records of its first k kernels (pytorch#192021)"),
    Setting("LATE_RECORDS", "0", "records come a flush after the next (1) or never (2)", "0, 1 or 2", "[012]"),
    flag("ZERO_STAMPS", "records of kernels, memcpys and memsets start and end at 0"),
    # what is shown
    flag("GEMM_SHAPES", "matmuls are named sim_gemm_MxNxK_TYPE, and not as cuBLAS names them on an H100"),
    flag("VERBOSE", "functions that are not implemented are named on stderr, once each"),
    Setting("LOG", "", "the file for the log of the whole process; %p in it is the process", "a path", ".*",
            at_start_only=True),
)  # fmt: skip

NUMERICS = flag("NUMERICS", "the values of kernels are computed")  # by Python: the libraries do not know it

BY_NAME = {setting.name: setting for setting in SETTINGS}


def check(environment: Mapping[str, str]) -> None:
    """Check the settings in an environment, where SIMGPU_NUMERICS is one too.

    Raises:
        ValueError: a name or a value that isn't accepted.
    """
    for variable, value in environment.items():
        if not variable.startswith("SIMGPU_"):
            continue
        name = variable.removeprefix("SIMGPU_")
        setting = NUMERICS if name == "NUMERICS" else BY_NAME.get(name)
        if setting is None:
            raise ValueError(f"{variable} is none of the settings: {', '.join(sorted(BY_NAME))}")
        setting.text(value)
        if name in ("LOG", "SHARED") and value and not Path(value).parent.is_dir():
            raise ValueError(f"{variable} must be a path in a folder that exists: {value!r}")
