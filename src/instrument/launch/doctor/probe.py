"""What a child process of the doctor does: it tells what torch is, and emits ranges for a profiler to record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import gpu

REGION = "instrument doctor"
PLAIN = "plain nvtx"
FACTS, TRACE = "facts.json", "torch.json"


def emit_nvtx() -> None:
    """Emit one range as this library does, and one as the package nvtx alone does."""
    import instrument

    with instrument.annotate(REGION):
        pass
    try:
        import nvtx
    except ImportError:
        return
    with nvtx.annotate(PLAIN, domain=PLAIN):
        pass


def examine_torch(folder: Path) -> None:
    """Write into ``folder`` what torch is, as far as it can be told before it crashes, and a trace of a region."""
    facts: dict[str, Any] = {}

    def tell(**more: Any) -> None:
        facts.update(more)
        part = folder / "part"  # a crash leaves all of it or none
        part.write_text(json.dumps(facts))
        part.replace(folder / FACTS)

    import torch

    tell(version=torch.__version__, cuda=torch.version.cuda, rocm=torch.version.hip)
    gpus, why = _gpus()
    tell(gpus=gpus, why_no_gpu=why)
    _record(folder, "cuda" if gpus and not why else "cpu")
    tell(recorded=True)


def _gpus() -> tuple[list[str], str]:
    """Return the GPUs that torch finds, and why it cannot use any or, as it is full or busy, not the first now."""
    import torch

    names: list[str] = []
    if not torch.cuda.is_available():
        return names, _failure(torch.cuda.init) if gpu.built_for_cuda() else ""

    def use() -> None:
        names.extend(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
        torch.ones(1024, device="cuda").add(1)
        torch.cuda.synchronize()

    return names, _failure(use)


def _failure(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _record(folder: Path, device: str) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    import instrument

    ones = torch.ones(1024, device=device)
    with profile(activities=[ProfilerActivity.CPU] if device == "cpu" else None) as recorded:
        with instrument.annotate(REGION):
            ones.add(1)
        if device == "cuda":
            torch.cuda.synchronize()
    recorded.export_chrome_trace(str(folder / TRACE))


def main() -> None:
    """Do what the arguments of the process ask for."""
    if len(sys.argv) > 1:
        examine_torch(Path(sys.argv[1]))
    else:
        emit_nvtx()
