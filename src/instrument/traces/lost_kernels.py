"""Finds kernels that CUPTI lost at the beginning of a recording."""

from __future__ import annotations

import re

import numpy as np

from .table import KERNEL
from .trace import Trace

_LAUNCH = re.compile(r"^(?:cuda|cu|hip)[A-Za-z]*LaunchKernel")
_CAPTURE = re.compile(r"StreamBeginCapture")


def lost_at_head(trace: Trace) -> int:
    """Return how many of the first launches have no kernel in the trace, although later ones have.

    CUPTI registers its clock anew in each recording, and drops the records before that: the window number n of a
    process can lack its first n kernels. Launches that a CUDA graph captures run nothing, so 0 is returned
    for a trace with a capture; and for one without any kernel, which has no GPU work at all.
    """
    runtime = trace.runtime
    launches = np.flatnonzero(runtime.matching("name", _LAUNCH))
    launches = launches[np.argsort(runtime.start_ns[launches], kind="stable")]
    ran = np.isin(launches, trace.gpu.launch[trace.gpu.category == KERNEL])
    if not ran.any() or runtime.matching("name", _CAPTURE).any():
        return 0
    return int(np.argmax(ran))
