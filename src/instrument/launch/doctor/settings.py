"""What the environment says to this library and to profilers."""

from __future__ import annotations

import os
from pathlib import Path

from ...config import Settings, parse_emitters
from ...tools import TOOL_FREE_INJECTION
from .check import Check
from .machine import Machine
from .profilers import recorded_by

_ENTERING = {"NVTX_INJECTION64_PATH": TOOL_FREE_INJECTION, "CUDA_INJECTION64_PATH": "", "INTEL_LIBITTNOTIFY64": ""}
_PRELOADED = (
    "nsight",
    "toolsinjection",
    "rocprof",
    "roctracer",
    "ittnotify",
    "vtune",
    "cupti",
    "kineto",
    "dynolog",
)


def library(machine: Machine) -> Check:
    """Whether the environment turns regions off."""
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("INSTRUMENT")}
    if not Settings({"INSTRUMENT": given.get("INSTRUMENT", "1")}).enabled:
        sentence = f"INSTRUMENT={given['INSTRUMENT']}: everything of this library is off"
        return Check("problem", sentence, "unset INSTRUMENT", given)
    emitters = given.get("INSTRUMENT_EMITTERS") or "auto"
    try:
        chosen = parse_emitters(emitters)
    except ValueError as error:
        return Check("problem", f"INSTRUMENT_EMITTERS is ignored: {error}", "unset INSTRUMENT_EMITTERS", given)
    if chosen != "auto":
        sentence = f"INSTRUMENT_EMITTERS={emitters}: regions go there alone, whichever profiler records"
        return Check("note", sentence, "unset INSTRUMENT_EMITTERS", given)
    listed = ", ".join(f"{name}={value}" for name, value in given.items())
    return Check("ok", listed or "regions go to each profiler that records", facts=given)


def injected(machine: Machine) -> Check | None:
    """Whether libraries that a profiler has programs load are there, and what regions need to reach them."""
    given = {name: os.environ.get(name, "") for name in _ENTERING}
    given = {name: value for name, value in given.items() if value and value != _ENTERING[name]}
    for name, value in given.items():
        if "/" in value and not Path(value).exists():
            return Check("problem", f"{name} names a file that is not there: {value}", f"unset {name}", given)
    if "INTEL_LIBITTNOTIFY64" in given and not machine.package("ittapi"):
        sentence = "INTEL_LIBITTNOTIFY64 is set, and ittapi is missing: regions are lost"
        return Check("problem", sentence, "pip install ittapi", given)
    return Check("ok", ", ".join(given), facts=given) if given else None


def interfering(machine: Machine) -> Check | None:
    """What else in the environment changes what is recorded."""
    environ, found = os.environ, {}
    if environ.get("KINETO_USE_DAEMON"):
        found["KINETO_USE_DAEMON"] = "a daemon may start torch.profiler at any time"
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        found["CUDA_LAUNCH_BLOCKING"] = "each launch waits: times are not those of a usual run"
    if environ.get("TORCH_PROFILER_EMIT_ROCTX", "0") not in ("", "0"):
        found["TORCH_PROFILER_EMIT_ROCTX"] = "torch emits rocTX ranges itself"
    preloaded = "" if recorded_by() else environ.get("LD_PRELOAD", "")  # which is that profiler's own
    profilers = [
        Path(path).name
        for path in preloaded.replace(":", " ").split()
        if any(word in Path(path).name.lower() for word in _PRELOADED)
    ]
    if profilers:
        found["LD_PRELOAD"] = f"loads {', '.join(profilers)} into every program"
    if not found:
        return None
    sentence = "; ".join(f"{name}: {meaning}" for name, meaning in found.items())
    return Check("note", sentence, f"unset {' '.join(found)}", {name: environ[name] for name in found})
