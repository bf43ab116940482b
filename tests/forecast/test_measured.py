"""The scripts that read measured operators and make the table of them, with small made files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from scripts.forecast import neusight
from scripts.forecast.families import build
from scripts.forecast.traces import TRACES, operators

from instrument.forecast.gpus import GPUS
from instrument.forecast.operations import matmul
from instrument.forecast.operator_time import operator_time
from instrument.forecast.table import table_of

STEP_NS = 200.0  # of a wave, for each step of the sums; an A100 at its peak takes 182
WHOLE_NS = 2000.0
KERNEL = "ampere_sgemm_128x128_tn"


def matmul_rows(device: str, multiprocessors: int) -> list[str]:
    """Return rows of a GPU whose waves all take the same time; N is the length of the sums there."""
    rows = ["device,operator,B,M,N,K,latency_us,kernel,grid,block"]
    for tiles in (16, 32, 64, 128):
        for sums in (256, 512, 1024, 2048, 4096, 8192):
            waves = -(-(tiles * 64) // multiprocessors)
            us = waves * (STEP_NS * sums + WHOLE_NS) / 1e3
            rows.append(f"{device},linear,1,{128 * tiles},{sums},{128 * 64},{us},{KERNEL},64x{tiles}x1,256x1x1")
    return rows


def write(folder: Path, name: str, rows: list[str]) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(gzip.compress("\n".join(rows).encode()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of measurements of one GPU, and one operator of a model."""
    linear = matmul_rows("a100_80", 108)
    write(tmp_path, "operators/linear.csv.gz", linear)
    write(tmp_path, "operators/bmm.csv.gz", linear[:1])
    head = "device,operator,B,H,latency_us,kernel,grid,block"
    memory = [f"a100_80,add,{1 << power},1024,{3 * (1 << power) * 4096 / 1.6e6},,," for power in range(12, 18)]
    write(tmp_path, "operators/elem.csv.gz", [head, *memory])
    for name in ("ln", "softmax"):
        write(tmp_path, f"operators/{name}.csv.gz", [head])
    head = "name,target,input_shapes,output_shape,dtype,forward_ms,backward_ms,accumulate_ms"
    row = 'gelu,<built-in function gelu>,"[[4096, 8192]]","(4096, 8192)",torch.float32,0.208,0.308,0.0'
    view = 'view,view,"[[8, 8], [1]]","(64, 1)",torch.float32,0.008,0.0,0.0'
    write(tmp_path, "labels/a100_80-made-512-8.csv.gz", [head, view, row])
    return tmp_path


def test_the_columns_of_matmuls(folder: Path) -> None:
    """N is the length of the sums and K the columns of the result, which the grids of the kernels show."""
    gpu, first = next(neusight.operators(folder))
    assert gpu == "a100"
    assert first.operation == matmul("linear", "fp32", 1, 2048, 8192, 256)
    assert first.tile == (128, 128)


def test_operators_of_models_without_the_time_of_a_call(folder: Path) -> None:
    """The time of a call that launches nothing is subtracted; a model can be left out."""
    found = list(neusight.model_operators(folder))
    assert [(gpu, each.operations[0].family, round(each.ns)) for gpu, each in found] == [
        ("a100", "element-wise", 200_000),
        ("a100", "element-wise", 300_000),
    ]
    assert list(neusight.model_operators(folder, without="made")) == []


def test_the_table_finds_the_tile(folder: Path, recorded: Path) -> None:
    """The costs of a wave come out of the measured times, and matmuls in between are forecast by them."""
    table = table_of(build(folder, recorded))
    (tile,) = table.gpus["a100"].kernels["fp32"].tiles.items()
    assert tile == ((128, 128), (pytest.approx(STEP_NS, rel=0.01), pytest.approx(WHOLE_NS, rel=0.1)))
    found = operator_time(matmul("linear", "fp32", 1, 128 * 24, 128 * 64, 3000), GPUS["a100"], table)
    assert found.ns == pytest.approx(15 * (STEP_NS * 3000 + WHOLE_NS), rel=0.05)


def event(name: str, ts: float, duration: float, **more: object) -> dict[str, object]:
    return {"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": duration} | more


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder of traces with one matmul in BF16 and one softmax on the GPU."""
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    calls = [
        ("aten::addmm", [[512], [64, 256], [256, 512]], ["c10::BFloat16"] * 3, "sm90_gemm_tilesize64x64x64", 6.0),
        (
            "aten::_softmax",
            [[64, 512], [], []],
            ["c10::BFloat16", "Scalar", "Scalar"],
            "softmax_warp_forward",
            3.0,
        ),
    ]
    for number, (name, shapes, types, kernel, us) in enumerate(calls, 1):
        at = 100.0 * number
        args = {"External id": number, "Input Dims": shapes, "Input type": types}
        events.append(event(name, at, 50, cat="cpu_op", args=args))
        launch = {"External id": number, "correlation": number}
        events.append(event("cudaLaunchKernel", at + 10, 5, cat="cuda_runtime", args=launch))
        on_gpu = launch | {"device": 0, "stream": 7}
        events.append(event(kernel, at + 20, us, cat="kernel", args=on_gpu) | {"pid": 0, "tid": 7})
    devices = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in TRACES:
        text = json.dumps({"deviceProperties": devices, "traceEvents": events})
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def test_operators_of_traces(recorded: Path) -> None:
    """The matmul of a layer has the tile of its kernel; times are those of the kernels."""
    found = {each.operation.family: each for each in operators(recorded / f"{TRACES[0]}.json.gz")}
    assert found["linear"].operation == matmul("linear", "bf16", 1, 64, 512, 256)
    assert (found["linear"].ns, found["linear"].tile) == (6000, (64, 64))
    assert (found["softmax"].ns, found["softmax"].operation.bytes) == (3000, 2 * 64 * 512 * 2)
