"""What a child process of the doctor does: it tells what torch is, and emits ranges for a profiler to record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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
    available = torch.cuda.is_available()
    tell(gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if available else [])
    if not available and (torch.version.cuda or torch.version.hip):
        try:
            torch.cuda.init()
        except Exception as error:
            tell(why_no_gpu=str(error).partition("\n")[0])
    _record(folder, "cuda" if available else "cpu")
    tell(recorded=True)


def _record(folder: Path, device: str) -> None:
    import torch
    from torch.profiler import profile

    import instrument

    ones = torch.ones(1024, device=device)
    with profile() as recorded:
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
