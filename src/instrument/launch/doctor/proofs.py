"""Whether ranges arrive, found out by recording one with the real tool and reading it back."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...traces.processes import python
from ...traces.read import read_file
from ...traces.trace import Trace
from . import child, probe

_PROBE = f"from {probe.__name__} import main; main()"
_OPTIONS = ("--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite")


@dataclass(frozen=True)
class TorchProof:
    """What torch is, and whether torch.profiler records a region.

    Attributes:
        version: of torch; empty if it cannot be imported.
        cuda: the CUDA that it is built for, if any.
        rocm: the ROCm that it is built for, if any.
        gpus: the names of those that it finds.
        why_no_gpu: what it says where it is built for a GPU and can use none, or not the first one now.
        region: a region is in its trace.
        kernel: a kernel, launched from that region, is.
        failure: why any of this is not known.
    """

    version: str = ""
    cuda: str | None = None
    rocm: str | None = None
    gpus: Sequence[str] = ()
    why_no_gpu: str = ""
    region: bool = False
    kernel: bool = False
    failure: str = ""


@dataclass(frozen=True)
class NsysProof:
    """Whether NVTX ranges arrive in a report of Nsight Systems.

    Attributes:
        region: a region of this library is there, with its name and domain.
        plain: so is a range of `nvtx.annotate`.
        failure: why it is not known.
    """

    region: bool = False
    plain: bool = False
    failure: str = ""


def prove_torch(temp: Path, limit_s: float) -> TorchProof:
    """Import torch in a child, which records a region, and read that back."""
    facts: dict[str, object] = {}
    region = kernel = False
    try:
        with tempfile.TemporaryDirectory(prefix="instrument-doctor-", dir=temp) as name:
            folder = Path(name)
            ended = child.run(python(_PROBE, name), folder, limit_s, _environ(name))
            with suppress(FileNotFoundError):
                facts = json.loads((folder / probe.FACTS).read_text())
            failure = (
                ""
                if facts.pop("recorded", False)
                else ended.how("recording a region" if facts else "import torch")
            )
            if not failure:
                trace = read_file(folder / probe.TRACE)
                region = probe.REGION in trace.regions.text("name")
                kernel = _kernel(trace)
    except (OSError, ValueError) as error:  # a TraceError is one
        failure = str(error)
    return TorchProof(**facts, region=region, kernel=kernel, failure=failure)  # type: ignore[arg-type]


def _kernel(trace: Trace) -> bool:
    names = trace.regions.text("name")
    return any(row >= 0 and names[row] == probe.REGION for row in trace.kernels.region.tolist())


def prove_nsys(nsys: str, temp: Path, limit_s: float) -> NsysProof:
    """Run a child that emits two ranges under ``nsys profile``, and look for them in the report."""
    try:
        with tempfile.TemporaryDirectory(prefix="instrument-doctor-", dir=temp) as name:
            folder = Path(name)
            command = [nsys, "profile", *_OPTIONS, "--output", str(folder / "report"), *python(_PROBE)]
            ended = child.run(command, folder, limit_s, _environ(name))
            if ended.code != 0:
                return NsysProof(failure=ended.how("nsys profile"))
            report = folder / "report.sqlite"
            if not report.exists():
                left = ", ".join(sorted(path.name for path in folder.glob("report*"))) or "nothing"
                return NsysProof(failure=f"nsys profile left no report.sqlite but {left}")
            trace = read_file(report)
    except (OSError, ValueError) as error:  # a TraceError is one
        return NsysProof(failure=str(error))
    found = set(zip(trace.regions.text("name"), trace.regions.text("domain"), strict=True))
    return NsysProof((probe.REGION, "instrument") in found, (probe.PLAIN, probe.PLAIN) in found)


def _environ(temp: str) -> dict[str, str]:
    """The environment without this library's settings, which are looked at by themselves.

    What torch and a failed nsys leave in the temporary folder goes with ``temp``.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INSTRUMENT")}
    return kept | {"TMPDIR": temp}
