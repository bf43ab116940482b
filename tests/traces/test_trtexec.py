"""The times of queries that trtexec writes, in both of its formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.base.errors import TraceError
from instrument.read.jobs.read import read_trace

TIMES = {"Enq": (0.0, 0.3), "H2d": (0.1, 0.4), "Compute": (0.5, 4.5), "D2h": (4.6, 4.8)}


def written(path: Path, *queries: dict[str, tuple[float, float]]) -> Path:
    """Write queries as trtexec does."""
    rows = []
    for query in queries:
        pairs = (
            (f"{side}{key}Ms", time)
            for key, each in query.items()
            for side, time in zip(("start", "end"), each, strict=True)
        )
        rows.append("{ " + ", ".join(f'"{key}" : {time:g}' for key, time in pairs) + ', "latencyMs" : 4.7 }\n')
    path.write_text("[\n  " + ", ".join(rows) + "]\n")
    return path


def later(by: float) -> dict[str, tuple[float, float]]:
    return {key: (start + by, end + by) for key, (start, end) in TIMES.items()}


def test_queries(tmp_path: Path) -> None:
    """A query is a step up to the next one; its copies and its work have the call that enqueued them."""
    trace = read_trace(written(tmp_path / "times.json", later(10), TIMES))
    assert (trace.format, trace.steps.number.tolist()) == ("trtexec", [0, 1])
    assert (trace.steps.start_ns.tolist(), trace.steps.duration_ns.tolist()) == ([0, 10**7], [10**7, 4_800_000])
    gpu = trace.gpu
    assert gpu.text("category") == ["memcpy", "kernel", "memcpy"] * 2
    assert (gpu.start_ns.tolist()[:3], gpu.duration_ns.tolist()[:3]) == (
        [100_000, 500_000, 4_600_000],
        [300_000, 4_000_000, 200_000],
    )
    assert (gpu.launch.tolist(), gpu.step.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1])
    assert trace.args(gpu, 0) == {}


def test_tensorrt_7(tmp_path: Path) -> None:
    """It has no times of the calls, and other names; a copy that was not made is none."""
    query = {"In": (0.1, 0.1), "Compute": (0.5, 4.5), "Out": (4.6, 4.8)}
    trace = read_trace(written(tmp_path / "times.json", query))
    assert trace.gpu.text("name") == ["inference", "Memcpy DtoH"]
    assert (trace.steps.duration_ns.tolist(), len(trace.runtime)) == ([4_300_000], 0)


@pytest.mark.parametrize(
    "text", ['[{"startEnqMs": 1', '[{"startEnqMs": "x"}]', '[{"startEnqMs": 1e999, "endEnqMs": 2}]']
)
def test_damage(tmp_path: Path, text: str) -> None:
    """A file that is cut off, and one without times, is one error."""
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"cut off or damaged|no query with times"):
        read_trace(path)
