"""The cost of reading a trace and computing its metrics, compared with other tools: ``make bench``.

Each candidate runs in a new process, in turn with the others. Its time excludes imports; its memory is the peak of
the whole process, including imports. If less of the time is busy, other programs used the cores. ROUNDS=1 shortens
the benchmark, and LARGE=0 skips the file of 5 million events.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from measure import ROUNDS, verdict
from trace_files import TraceFile, TraceFiles, build

FEW = min(ROUNDS, 3)
ONE, MANY, MOST = 1, 8, 38  # tiles: 0.13, 1.06 and 5 million events
RANKS = 8
MOST_BYTES = 4 << 30  # of disk, for all files
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ours(path: Path) -> Callable[[], object]:
    """Read a trace and compute all metrics."""
    from instrument.explain.metrics.metrics import metrics
    from instrument.read.jobs.read import read_file

    return lambda: metrics(read_file(path))


def hta(path: Path) -> Callable[[], object]:
    """Load a trace and compute the breakdowns of one rank."""
    from hta.trace_analysis import TraceAnalysis

    def work() -> object:
        analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))
        return (
            analysis.get_temporal_breakdown(visualize=False),
            analysis.get_idle_time_breakdown(visualize=False),
            analysis.get_gpu_kernel_breakdown(visualize=False),
            analysis.get_comm_comp_overlap(visualize=False),
        )

    return work


def tensorboard(path: Path) -> Callable[[], object]:
    """Do the plugin's work for one worker in this process."""
    from torch_tb_profiler.profiler.data import DistributedRunProfileData, RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    def work() -> object:
        data = RunProfileData.parse("worker0", None, str(path), str(path.parent))
        return RunGenerator("worker0", None, data).generate_run_profile(), DistributedRunProfileData(data)

    return work


def plain(path: Path) -> Callable[[], object]:
    """Decode the JSON to Python objects."""

    def work() -> object:
        with path.open() as file:
            return json.load(file)

    return work


def read_only(path: Path) -> Callable[[], object]:
    """Read a trace."""
    from instrument.read.jobs.read import read_file

    return lambda: read_file(path)


def diagnosed(path: Path) -> Callable[[], object]:
    """Read a trace and diagnose it."""
    from instrument.explain.diagnosis.diagnose import diagnose

    return lambda: diagnose(path)


def page(path: Path) -> Callable[[], object]:
    """Diagnose a trace and make the page."""
    from instrument.explain.diagnosis.diagnose import diagnose
    from instrument.show.page.document import document
    from instrument.show.sections.diagnosis import page_of

    document("", "", [])  # imports the template engine
    return lambda: page_of(diagnose(path))


def one_rank(path: Path) -> Callable[[], object]:
    """Read the first file of a folder."""
    from instrument.read.jobs.read import read_file

    return lambda: read_file(min(path.iterdir()))


def all_ranks(path: Path) -> Callable[[], object]:
    """Read all files of a folder with child processes."""
    from instrument.read.jobs.ranks import read_ranks
    from instrument.read.jobs.read import read_file

    return lambda: read_ranks(path, read_file)


BESIDE = {
    "instrument": ours,
    "HolisticTraceAnalysis": hta,
    "torch_tb_profiler": tensorboard,
    "json.load, no numbers": plain,
}
CANDIDATES = BESIDE | {
    "read": read_only,
    "diagnose": diagnosed,
    "page": page,
    "one rank": one_rank,
    "all ranks": all_ranks,
}


class Cost(NamedTuple):
    """The cost of a candidate: seconds, CPU seconds, and peak bytes."""

    seconds: float
    busy: float
    peak: float

    def __str__(self) -> str:
        return f"{self.seconds:8.2f} s, {self.busy:.2f} busy {self.peak / 1e6:8,.0f} MB"


def child(name: str, path: Path) -> None:
    """Run one candidate and print its cost."""
    work = CANDIDATES[name](path)
    begin, begin_busy = time.perf_counter(), time.process_time()
    result = work()
    seconds, busy = time.perf_counter() - begin, time.process_time() - begin_busy
    assert result is not None
    unit = 1 if sys.platform == "darwin" else 1024
    print(json.dumps([seconds, busy, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit]))


def costs(candidates: list[tuple[str, Path]], rounds: int) -> list[Cost]:
    """Return the medians of each candidate, in fresh processes and in turn."""
    found: list[list[list[float]]] = [[] for _ in candidates]
    for _ in range(rounds):
        for (name, path), results in zip(candidates, found, strict=True):
            run = subprocess.run([sys.executable, __file__, name, str(path)], capture_output=True, text=True)
            if run.returncode:
                sys.exit(f"{name} failed on {path.name}:\n{run.stderr}")
            results.append(json.loads(run.stdout.splitlines()[-1]))
    return [Cost(*map(statistics.median, zip(*results, strict=True))) for results in found]


def beside(file: TraceFile, rounds: int) -> None:
    """All candidates on one file."""
    print(f"\nReading and all numbers: {file}, medians of {rounds}")
    by_name = dict(zip(BESIDE, costs([(name, file.path) for name in BESIDE], rounds), strict=True))
    theirs, mine = by_name["HolisticTraceAnalysis"], by_name["instrument"]
    for name, cost in by_name.items():
        ratios = f"{cost.seconds / theirs.seconds:8.3f} x {cost.peak / theirs.peak:8.3f} x HTA"
        print(f"  {name:24} {cost} {ratios}")
    verdict("time to HTA", mine.seconds / theirs.seconds, 0.1)
    verdict("peak memory to HTA", mine.peak / theirs.peak, 0.2)
    verdict("peak memory to the file's size", mine.peak / file.size, 1.3)


def diagnosis(file: TraceFile) -> None:
    """Measure a diagnosis against reading alone, and the whole command."""
    print(f"\nA diagnosis: {file}, medians of {ROUNDS}")
    read, diagnose = costs([("read", file.path), ("diagnose", file.path)], ROUNDS)
    command = [sys.executable, "-m", "instrument", "diagnose", str(file.path)]
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        seconds.append(time.perf_counter() - begin)
    print(f"  reading alone {read}")
    print(f"  diagnose      {diagnose}")
    verdict("diagnose to reading alone", diagnose.seconds / read.seconds, 1.6)
    verdict("the command, in seconds", statistics.median(seconds), 1.5)


def linear(tiled: dict[int, TraceFile]) -> None:
    """Measure reading and metrics of increasingly long files."""
    print(f"\nTime by events, medians of {FEW}")
    found = costs([("instrument", file.path) for file in tiled.values()], FEW)
    each = [cost.seconds / file.events * 1e9 for cost, file in zip(found, tiled.values(), strict=True)]
    for file, cost, time_each in zip(tiled.values(), found, each, strict=True):
        print(f"  {file!s:32} {cost} {cost.peak / file.size:6.2f} x the file {time_each:8,.0f} ns an event")
    for file, time_each in list(zip(tiled.values(), each, strict=True))[1:]:
        verdict(f"an event of {file.events / 1e6:.2f} million to one of 0.13", time_each / each[0], 1.3)


def parallel(files: TraceFiles) -> None:
    """Measure reading the ranks of a job with as many processes as cores."""
    one, every = costs([("one rank", files.ranks), ("all ranks", files.ranks)], FEW)
    print(f"\nRanks on {CORES} cores, medians of {FEW}, without metrics: {files.rank}, each")
    print(f"  one {one.seconds:.2f} s, {RANKS} in {every.seconds:.2f} s")
    verdict(f"{RANKS} ranks to one", every.seconds / one.seconds, 1.2 * RANKS / CORES)


def tiles(folder: Path) -> tuple[int, ...]:
    """Return how often to tile the file."""
    free = shutil.disk_usage(folder).free
    if os.environ.get("LARGE", "1") == "0":
        return ONE, MANY
    if free < MOST_BYTES:
        need = f"{free / 1e9:.1f} GB free of {MOST_BYTES / 1e9:.1f} needed"
        print(f"5 million events are left out: {folder} has {need}")
        return ONE, MANY
    return ONE, MANY, MOST


def main() -> None:
    """Build the files in a child process, so that the peak memory of this one stays small."""
    with tempfile.TemporaryDirectory(prefix="instrument-bench-") as name:
        folder = Path(name)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            files = pool.submit(build, folder, tiles(folder), RANKS).result()
        print(f"\nPython {sys.version.split()[0]}, first file: {files.origin}; the others are tiled from it")
        beside(files.first, FEW)
        beside(files.tiled[MANY], 1)
        diagnosis(files.first)
        linear(files.tiled)
        parallel(files)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        child(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
