"""Conversion of traces to Arrow, pandas and Parquet, and queries by DuckDB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from instrument.read.kineto.kineto import read_kineto
from instrument.read.tables.links import assemble
from instrument.read.tables.table import COLUMNS, TEXT, Strings
from instrument.read.tables.trace import Device, ReadLosses, Thread, Trace, to_arrow
from tests.support.shared_traces import shared

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pandas")

DATA = Path(__file__).parents[1] / "data" / "gpu_two_steps.json"


@pytest.fixture
def trace() -> Trace:
    return read_kineto(DATA)


def assert_round_trip(trace: Trace, tables: dict[str, arrow.Table]) -> None:
    assert list(tables) == list(COLUMNS)
    for kind, table in tables.items():
        rows = getattr(trace, kind)
        assert table["row"].to_pylist() == list(range(len(rows)))
        for name in COLUMNS[kind]:
            if name in TEXT:
                assert table[name].to_pylist() == rows.text(name), (kind, name)
            else:
                assert table[name].type == arrow.from_numpy_dtype(rows[name].dtype)
                np.testing.assert_array_equal(table[name].to_numpy(), rows[name], f"{kind}.{name}")
        if "thread" in rows:
            known = [trace.threads[number] if number >= 0 else None for number in rows.thread.tolist()]
            assert table["process"].to_pylist() == [thread and str(thread.process) for thread in known]
            assert table["thread_id"].to_pylist() == [thread and str(thread.thread) for thread in known]
            assert table["thread_name"].to_pylist() == [thread and thread.name for thread in known]


@pytest.mark.parametrize("name", [None, "tl_h100_bert_small.json.gz", "hta_nccl_data.json.gz"])
def test_every_column_is_exported(name: str | None, tmp_path: Path) -> None:
    """Arrow tables and Parquet files have every column of every table."""
    trace = read_kineto(shared(name) if name else DATA)
    tables = to_arrow(trace)
    assert_round_trip(trace, tables)
    files = trace.to_parquet(tmp_path / "out")
    assert files == [tmp_path / "out" / f"{kind}.parquet" for kind in COLUMNS]
    assert sorted((tmp_path / "out").iterdir()) == sorted(files)
    back = {file.stem: parquet.read_table(file) for file in files}
    assert_round_trip(trace, back)
    assert {kind: table.schema for kind, table in tables.items()} == {
        kind: table.schema for kind, table in back.items()
    }


def test_metadata_of_files(trace: Trace, tmp_path: Path) -> None:
    """Each file has the metadata of the trace as JSON in its schema."""
    trace.rank, trace.world_size, trace.epoch_ns = 3, 8, 17
    trace.devices = [Device(0, "NVIDIA H100", 132)]
    trace.metadata = {"schemaVersion": 1, "huge": 2**70}
    for file in trace.to_parquet(tmp_path):
        about = json.loads(parquet.read_schema(file).metadata[b"instrument"])
        assert (about["path"], about["format"]) == (str(DATA), "kineto")
        assert (about["rank"], about["world_size"], about["epoch_ns"]) == (3, 8, 17)
        assert about["devices"][0]["name"] == "NVIDIA H100"
        assert about["metadata"] == {"schemaVersion": 1, "huge": 2**70}
        assert about["coverage"]["launch"]["of"] == len(trace.gpu)
        assert about["lost"]["reasons"] == {}


def test_data_frames(trace: Trace) -> None:
    """Text is categorical, times are integers, and links refer to the index."""
    frames = trace.to_pandas()
    gpu, regions = frames["gpu"], frames["regions"]
    assert str(gpu["name"].dtype) == "category"
    assert str(gpu["start_ns"].dtype) == "int64"
    assert gpu["name"].tolist() == trace.gpu.text("name")
    joined = gpu.join(regions["name"].rename("name_of_region"), on="region")
    expected = [trace.regions.text("name")[row] if row >= 0 else None for row in trace.gpu.region.tolist()]
    assert [name if isinstance(name, str) else None for name in joined["name_of_region"]] == expected
    assert any(expected)
    kernels = trace.kernels.to_pandas()
    assert kernels["name"].tolist() == trace.kernels.text("name")
    assert "row" not in kernels


def test_query_over_files(trace: Trace, tmp_path: Path) -> None:
    """DuckDB joins GPU work to its region, over the ranks of a job."""
    duckdb = pytest.importorskip("duckdb")
    for rank in (0, 1):
        trace.to_parquet(tmp_path / f"rank={rank}")
    rows = duckdb.sql(
        f"""
        SELECT gpu.rank, regions.name, sum(gpu.duration_ns)
        FROM read_parquet('{tmp_path}/*/gpu.parquet') gpu
        JOIN read_parquet('{tmp_path}/*/regions.parquet') regions
        ON gpu.region = regions.row AND gpu.rank = regions.rank
        GROUP BY ALL
        """
    ).fetchall()
    names = np.array(trace.regions.text("name"))[trace.gpu.region[trace.gpu.region >= 0]]
    times = trace.gpu.duration_ns[trace.gpu.region >= 0]
    expected = {(rank, name, int(times[names == name].sum())) for rank in (0, 1) for name in set(names.tolist())}
    assert set(rows) == expected
    assert expected


def test_unusual_names(tmp_path: Path) -> None:
    """Half a surrogate pair, a thread id that is text and an unknown thread are kept."""
    strings = Strings()
    columns = {
        "operators": {
            "start_ns": np.array([1, 2, 3]),
            "name": np.array([strings["a\ud83d"], strings["löss 🙂"], 0]),
            "thread": np.array([0, 1, -1]),
        }
    }
    trace = assemble(
        tmp_path,
        "kineto",
        columns,
        strings,
        [Thread(1, "stream 7"), Thread("Spans", 2)],
        devices=[],
        metadata={},
        lost=ReadLosses(),
    )
    operators = parquet.read_table(trace.to_parquet(tmp_path)[0])
    assert operators["name"].to_pylist() == ["a\\ud83d", "löss 🙂", ""]
    assert operators["process"].to_pylist() == ["1", "Spans", None]
    assert operators["thread_id"].to_pylist() == ["stream 7", "2", None]


def test_full_disk(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that becomes full leaves the previous files, and nothing else."""
    trace.to_parquet(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    whole, count = parquet.write_table, iter(range(99))

    def full(table: arrow.Table, path: Path) -> None:
        whole(table, path)
        if next(count) == 3:
            raise OSError("no space left on device")

    monkeypatch.setattr(parquet, "write_table", full)
    trace.rank = 5
    with pytest.raises(OSError, match="no space left"):
        trace.to_parquet(tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_folder_that_is_a_file(trace: Trace, tmp_path: Path) -> None:
    """The error names the file and the accepted values."""
    file = tmp_path / "trace.parquet"
    file.write_text("mine")
    with pytest.raises(NotADirectoryError, match=r'"folder" must be a folder: .*trace.parquet'):
        trace.to_parquet(file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("missing", "call"), [("pyarrow", "to_arrow"), ("pyarrow", "to_parquet"), ("pandas", "to_pandas")]
)
def test_missing_libraries(missing: str, call: str, tmp_path: Path) -> None:
    """The error has the pip line, nothing is written, and reading traces needs neither package."""
    program = f"""
import sys
from pathlib import Path
sys.modules[{missing!r}] = None
from instrument.read.kineto import kineto
trace = kineto.read_kineto(Path({str(DATA)!r}))
assert "pyarrow" not in sys.modules or sys.modules["pyarrow"] is None
try:
    trace.{call}(*[{str(tmp_path / "out")!r}] * {call == "to_parquet"})
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"{missing}: pip install 'torch-instrument[traces]'\n")
    assert not (tmp_path / "out").exists()
