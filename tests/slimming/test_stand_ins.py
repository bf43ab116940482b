"""Anonymized traces: hostile names, stable stand-ins, and the names and numbers that stay."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument import slim
from instrument.explain.metrics.matmul_table import MATRIX_UNITS
from instrument.explain.slimming.names import StandIns
from instrument.read.tables.kernel_names import family, parse
from instrument.read.tables.work_classes import communicates

from .random_traces import RandomTrace
from .test_slim import complete, write

KERNELS = (
    "corp_flash_attention_v9", "void corp::sgemm_hmma<8>()", "corp_hmma", "/corp/flash", "corpgemm_tf32",
    "corpnccl", "void corp::AllReduceKernel<float>()", "corp_reduce_scatter", "block_all_reduce_corp",
    "triton_red_fused_corp_0", "corp_" * 150 + "softmax", "softmax" + "_corp" * 150, "kernel für corp softmax",
)  # fmt: skip
SECRETS = ("alice", "secret", "corp", "bob", "hush")


def hostile() -> dict[str, Any]:
    """Return a trace with names of people, machines and their code wherever a file can have them."""
    events = [
        complete("user_annotation", "ProfilerStep#3", 0, 900),
        complete("user_annotation", "load /home/alice/secret.bin for bob@corp", 1, 800),
        complete("user_annotation", "Optimizer.step#AliceAdam.step", 700, 750),
        complete("user_annotation", "layer_3_of_alice", 2, 5),
        complete("python_function", r"C:\Users\alice\secret\train.py(12): bob_step", 3, 600),
        complete("python_function", "/home/alice/lib/site-packages/torch/nn/functional.py(3): linear", 4, 500),
        complete("python_function", "/home/alice/lib/site-packages/corp_models/net.py(3): secret", 5, 400),
        complete("python_function", "<built-in method hush of AliceTensor object at 0x7f>", 6, 300),
        complete("python_function", "nn.Module: SecretBlock_4", 7, 200),
        complete("python_function", "torch/../home/alice/x.py(1): f", 8, 150),
        complete("cpu_op", "corp::secret_op", 10, 40, args={"Input Dims": [[2]], "Input type": ["torch.Alice"]}),
        complete("cpu_op", "aten::mm", 50, 60, args={"Input Dims": [[8, 8]] * 2, "Input type": ["float", "bob"]}),
        complete("cpu_op", "autograd::engine::evaluate_function: AliceFunctionBackward", 61, 65),
        complete("cpu_op", "aten::/home/alice", 66, 67),
        complete("cuda_runtime", "cudaLaunchKernel", 52, 54, args={"correlation": 1}),
        complete("cuda_runtime", "cudaStreamSynchronize", 70, 90),
        complete("kernel", "void corp::secret_gemm<8>(float*)", 60, 70, 7, args={
            "device": 0, "stream": 7, "correlation": 1, "Collective name": "alice_reduce",
            "Process Group Name": "corp-group", "dtype": "Float",
        }),
        complete("alice_category", "Python GC in /home/alice", 950, 960),
        {"ph": "i", "name": "instrument_steps=3-3", "pid": "corp-host", "tid": "bob", "ts": 970, "s": "g"},
        {"ph": "C", "name": "alice counter", "pid": 1, "tid": 1, "ts": 999, "args": {"secret": 3}},
        {"ph": "M", "name": "process_name", "pid": 4711, "tid": 0, "args": {"name": "/home/alice/train"}},
        {"ph": "M", "name": "process_labels", "pid": 4711, "tid": 0, "args": {"labels": "corp-host-12"}},
        {"ph": "M", "name": "thread_name", "pid": 4711, "tid": 4711, "args": {"name": "alice"}},
    ]  # fmt: skip
    group = {"pg_name": "corp-group", "pg_desc": "secret", "pg_size": 2, "ranks": [0, 1]}
    about = {
        "distributedInfo": {"rank": 0, "world_size": 2, "backend": "nccl", "pg_config": [group], "host": "corp"}
    }
    return about | {
        "traceName": "/home/alice/x.json",
        "user": "bob",
        "traceEvents": events,
        "hostname": "corp-host",
    }


def text_of(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


@pytest.mark.parametrize("key", ["", "hush"])
def test_nothing_identifies(key: str, tmp_path: Path) -> None:
    """No name of a person, a machine or their code is left, and all numbers stay."""
    made = slim(write(tmp_path / "trace.json", hostile()), anonymize=True, key=key)
    text = text_of(made.path).lower()
    assert [secret for secret in SECRETS if secret in text] == []
    assert made.changed == ()
    read = instrument.read_trace(made.path)
    assert {"aten::mm"} < set(read.operators.text("name"))
    assert read.metadata["distributedInfo"] == {
        "backend": "nccl", "rank": 0, "world_size": 2,
        "pg_config": [{"pg_name": read.gpu.text("group")[0], "pg_size": 2, "ranks": [0, 1]}],
    }  # fmt: skip


def test_stand_ins_are_the_same_in_all_files_with_one_key(tmp_path: Path) -> None:
    """The ranks of a job keep their common names; another key gives other stand-ins."""
    one, two, other = StandIns("a"), StandIns("a"), StandIns("b")
    name = "layer_3 of alice"
    assert one.event("regions", name) == two.event("regions", name) != other.event("regions", name)
    assert one.event("regions", "layer_3 of alice").endswith("_3")
    assert one.event("regions", "layer_4 of alice")[:10] == one.event("regions", name)[:10]
    path = write(tmp_path / "trace.json", hostile())
    files = [slim(path, tmp_path / f"{number}.json.gz", anonymize=True).path for number in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("operators", "aten::_scaled_dot_product_flash_attention"),
        ("operators", "autograd::engine::evaluate_function: AddmmBackward0"),
        ("regions", "ProfilerStep#12"),
        ("regions", "Optimizer.step#AdamW.step"),
        ("regions", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"),
        ("regions", "nccl:all_reduce"),
        ("regions", "Torch-Compiled Region: 0/0"),
        ("gpu", "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)"),
        ("gpu", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        ("gpu", "Memcpy HtoD (Pageable -> Device)"),
        ("frames", "torch/nn/modules/linear.py(124): forward"),
        ("frames", "nn.Module: LayerNorm_12"),
        ("runtime", "cudaLaunchKernelExC"),
    ],
)
def test_names_of_torch_and_libraries_stay(table: str, name: str) -> None:
    """Names that every program has are kept."""
    assert StandIns().event(table, name) == name


def test_a_stand_in_of_a_kernel_has_its_family() -> None:
    """A kernel of the user keeps its family, on which findings rest."""
    names = StandIns()
    for name in KERNELS:
        found = names.event("gpu", name)
        assert found != name
        assert family(parse(found)) == family(parse(name))
        assert communicates(found) == communicates(name)
        assert bool(MATRIX_UNITS.search(found)) == bool(MATRIX_UNITS.search(name))


@pytest.mark.parametrize("seed", range(12))
def test_numbers_stay(seed: int, tmp_path: Path) -> None:
    """The metrics and findings of an anonymized trace have the same numbers."""
    made = slim(write(tmp_path / "trace.json", RandomTrace(seed).content), anonymize=True)
    assert made.changed == ()
    assert "train.py" not in text_of(made.path)
    assert json.loads(text_of(made.path))["traceEvents"]
