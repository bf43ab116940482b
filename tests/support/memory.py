"""The memory of this process at its peak."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def peak_kib() -> int:
    """Return the most memory, in KiB, that this process had at once.

    On Linux, ``ru_maxrss`` of a new process begins with that of the process that started it.
    """
    if sys.platform == "linux":
        (found,) = re.findall(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
