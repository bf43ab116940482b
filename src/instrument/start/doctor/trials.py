"""Trials of the real tools: a child process opens a region under a profiler, whose output is read back.

`main` runs in the child, which may crash or hang instead of the doctor.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...base.compat import gpu
from ...base.printable import printable

REGION = "instrument doctor"
PLAIN = "plain nvtx"
FACTS, TRACE = "facts.json", "torch.json"
_CHILD = f"from {__name__} import main; main()"
_NSYS_OPTIONS = ("--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite")
_GRACE_S = 5.0  # for a profiler that is ended to remove its temporary files


@dataclass(frozen=True)
class TorchTrial:
    """The build of torch, and whether torch.profiler records a region.

    Attributes:
        version: the version of torch; empty if torch cannot be imported.
        cuda: the CUDA version of the build, if any.
        rocm: the ROCm version of the build, if any.
        gpus: the names of the GPUs that torch finds.
        why_no_gpu: torch's reason why it can use no GPU, or not the first one now.
        region: whether the region is in the trace.
        kernel: whether a kernel that the region launched is in the trace.
        failure: why the trial failed; empty if it did not.
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
class NsysTrial:
    """Whether NVTX ranges arrive in a report of Nsight Systems.

    Attributes:
        region: whether a region of this library is in the report, with its name and domain.
        plain: whether a range of `nvtx.annotate` is.
        failure: why the trial failed; empty if it did not.
    """

    region: bool = False
    plain: bool = False
    failure: str = ""


def try_torch(temp: Path, limit_s: float) -> TorchTrial:
    """Import torch in a child that records a region, and read the trace."""
    from ...read.jobs.processes import python
    from ...read.jobs.read import read_file

    facts: dict[str, object] = {}
    region = kernel = False
    try:
        with _folder(temp) as folder:
            ended = run(python(_CHILD, str(folder)), folder, limit_s)
            with suppress(FileNotFoundError):
                facts = json.loads((folder / FACTS).read_text())
            failure = ""
            if facts.pop("recorded", False):
                trace = read_file(folder / TRACE)
                region, kernel = REGION in trace.regions.text("name"), has_kernel(trace)
            else:
                failure = ended.describe("recording a region" if facts else "import torch")
    except (OSError, ValueError) as error:  # a TraceError is a ValueError
        failure = str(error)
    return TorchTrial(**facts, region=region, kernel=kernel, failure=failure)  # type: ignore[arg-type]


def has_kernel(trace: Any) -> bool:
    """Return whether the region of the trial launched a kernel in ``trace``."""
    names = trace.regions.text("name")
    return any(row >= 0 and names[row] == REGION for row in trace.kernels.region.tolist())


def try_nsys(nsys: str, temp: Path, limit_s: float) -> NsysTrial:
    """Run a child that emits two ranges under ``nsys profile``, and read the report."""
    from ...read.jobs.processes import python
    from ...read.jobs.read import read_file

    try:
        with _folder(temp) as folder:
            command = [nsys, "profile", *_NSYS_OPTIONS, "--output", str(folder / "report"), *python(_CHILD)]
            ended = run(command, folder, limit_s)
            if ended.code != 0:
                return NsysTrial(failure=ended.describe("nsys profile"))
            report = folder / "report.sqlite"
            if not report.exists():
                left = ", ".join(sorted(path.name for path in folder.glob("report*"))) or "nothing"
                return NsysTrial(failure=f"nsys profile wrote no report.sqlite, but {left}")
            trace = read_file(report)
    except (OSError, ValueError) as error:  # a TraceError is a ValueError
        return NsysTrial(failure=str(error))
    ranges = set(zip(trace.regions.text("name"), trace.regions.text("domain"), strict=True))
    return NsysTrial((REGION, "instrument") in ranges, (PLAIN, PLAIN) in ranges)


@contextmanager
def _folder(temp: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="instrument-doctor-", dir=temp) as name:
        yield Path(name)


class ProgramEnd(NamedTuple):
    """How a program ended; ``code`` is None if it exceeded its time limit."""

    code: int | None
    output: str

    def describe(self, what: str) -> str:
        """Return a sentence on how ``what`` ended, with the last line that it printed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        last = f": {printable(lines[-1][:300])}" if lines else ""
        if self.code is None:
            return f"{what} did not end in time{last}"
        if self.code < 0:
            return f"{what} was killed by {signal.Signals(-self.code).name}{last}"
        return f"{what} ended with code {self.code}{last}"


def run(command: Sequence[str], folder: Path, limit_s: float) -> ProgramEnd:
    """Run ``command`` and return how it ended; all processes that it started end with it.

    It gets none of this library's settings, which have a check of their own.

    Args:
        command: the program and its arguments.
        folder: an empty folder to run in, away from the user's files, and for temporary files. The output goes to
            a file there: a pipe would stay open as long as any process that the program started.
        limit_s: the time limit.

    Raises:
        OSError: the program cannot be started, or the file cannot be written.
    """
    log = folder / "log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INSTRUMENT")}
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=kept | {"TMPDIR": str(folder)},
            start_new_session=True,
        )
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(limit_s)
        finally:
            if child.returncode is None:
                _signal(child, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_GRACE_S)
                _signal(child, getattr(signal, "SIGKILL", signal.SIGTERM))  # also the processes it started
                child.wait()
    return ProgramEnd(code, log.read_bytes().decode(errors="replace"))


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, number)  # it leads a process group of its own
        else:
            child.kill()


def main() -> None:
    """Record a region with torch into the folder of the arguments; without one, emit ranges for nsys."""
    if len(sys.argv) > 1:
        record_torch(Path(sys.argv[1]))
    else:
        _emit_nvtx()


def _emit_nvtx() -> None:
    """Emit one range through this library, and one through the package nvtx alone."""
    import instrument

    with instrument.annotate(REGION):
        pass
    try:
        import nvtx
    except ImportError:
        return
    with nvtx.annotate(PLAIN, domain=PLAIN):
        pass


def record_torch(folder: Path) -> None:
    """Write a trace of a region into ``folder``, and before that the facts known so far, in case torch crashes."""
    facts: dict[str, Any] = {}

    def write(**more: Any) -> None:
        facts.update(more)
        part = folder / "part"  # a crash leaves the whole file or none
        part.write_text(json.dumps(facts))
        part.replace(folder / FACTS)

    import torch

    write(version=torch.__version__, cuda=torch.version.cuda, rocm=torch.version.hip)
    gpus, why = _usable_gpus()
    write(gpus=gpus, why_no_gpu=why)
    _record_region(folder, "cuda" if gpus and not why else "cpu")
    write(recorded=True)


def _usable_gpus() -> tuple[list[str], str]:
    """Return the names of torch's GPUs, and the reason if it can use none or, when busy or full, not the first."""
    import torch

    names: list[str] = []
    if not torch.cuda.is_available():
        return names, _failure_of(torch.cuda.init) if gpu.built_for_cuda() else ""

    def use() -> None:
        names.extend(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
        torch.ones(1024, device="cuda").add(1)
        torch.cuda.synchronize()

    return names, _failure_of(use)


def _failure_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _record_region(folder: Path, device: str) -> None:
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
