"""rocprofv3's CSV files: kernels, and what lies beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.base.errors import TraceError
from instrument.read.jobs.read import read_trace, read_traces
from instrument.read.tables.table import KERNEL, MEMCPY

from .rocm_files import CSV_FILES, CSV_KERNELS


def written(folder: Path, prefix: str = "101_", **files: str) -> Path:
    for name, text in (files or CSV_FILES).items():
        (folder / f"{prefix}{name}.csv").write_text(text)
    return folder / f"{prefix}kernel_trace.csv"


@pytest.mark.parametrize("named", ["kernel_trace", "marker_api_trace"])
def test_the_files_of_a_process(tmp_path: Path, named: str) -> None:
    """Whichever file is named, the trace has all of them: work, its launches, the ranges around these, the GPU."""
    trace = read_trace(written(tmp_path).with_name(f"101_{named}.csv"))
    assert (trace.format, bool(trace.lost), trace.gpu.category.tolist()) == ("rocprof", False, [KERNEL, MEMCPY])
    assert (trace.gpu.start_ns.tolist(), trace.gpu.duration_ns.tolist()) == ([2000, 3000], [900, 400])
    assert trace.gpu.text("name") == ["void add<float>(float*, int)", "Memcpy HtoD (Host -> Device)"]
    assert [trace.runtime.text("name")[row] for row in trace.gpu.launch] == ["hipLaunchKernel", "hipMemcpyAsync"]
    assert [trace.regions.text("name")[row] for row in trace.gpu.region] == ["forward"] * 2
    assert (trace.gpu.blocks.tolist(), trace.gpu.stream.tolist(), trace.gpu.device.tolist()) == (
        [64, -1],
        [2, 2],
        [0, 0],
    )
    [gpu] = trace.devices
    assert (gpu.name, gpu.sms, gpu.threads_per_sm) == ("AMD Instinct MI300X", 304, 2048)


def test_kernels_alone(tmp_path: Path) -> None:
    """Without the other files, kernels have no launch; the case of the columns does not matter."""
    trace = read_trace(written(tmp_path, kernel_trace=CSV_KERNELS.replace("VGPR_Count", "Vgpr_Count", 1)))
    assert (trace.gpu.registers.tolist(), trace.gpu.launch.tolist(), trace.devices[0].name) == ([8], [-1], "")


def test_processes_of_a_folder(tmp_path: Path) -> None:
    """A folder with the files of several processes holds as many traces."""
    for prefix in ("101_", "102_"):
        written(tmp_path, prefix)
    assert [len(trace.gpu) for trace in read_traces(tmp_path).values()] == [2, 2]


def test_damage(tmp_path: Path) -> None:
    """Rows without times are lost; a file without a row is no trace."""
    trace = read_trace(written(tmp_path, kernel_trace=CSV_KERNELS + '"KERNEL_DISPATCH","Agent 4",17\n'))
    assert (len(trace.gpu), trace.lost.events) == (1, 1)
    with pytest.raises(TraceError, match="it has no event"):
        read_trace(written(tmp_path, kernel_trace=CSV_KERNELS.partition("\n")[0] + "\n"))


def test_other_tables(tmp_path: Path) -> None:
    """Sums by kernel, which rocprofv3 --stats writes, are named."""
    path = tmp_path / "101_kernel_stats.csv"
    path.write_text('"Name","Calls","TotalDurationNs","AverageNs","Percentage"\n"add",1,5,5.0,100\n')
    with pytest.raises(TraceError, match=r"a table of sums of rocprofv3 --stats.*kernel_trace\.csv"):
        read_trace(path)
