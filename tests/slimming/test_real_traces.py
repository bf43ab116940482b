"""Slim traces of real traces: nothing differs, and the sizes are those of docs/slim.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.slim_page import PAGE, made_slim

from instrument import diagnose, read_trace, slim
from instrument.explain.slimming.choice import chosen_parts, may_renumber
from instrument.explain.slimming.names import Names
from instrument.explain.slimming.write import trace_bytes

from ..support.shared_traces import FOLDER, shared

_ROW = re.compile(r"^\| `([^`]+)` \|(?:[ \d,]+\|){4} ([\d.]+) \|$", re.MULTILINE)
SAMPLES = {name: float(factor) for name, factor in _ROW.findall(PAGE.read_text())}
_SMALL = 4_000  # bytes: below, the head of the file and the names are most of it
_ZLIB = 0.03  # other versions of zlib differ by less
ANONYMIZED = [  # plain and gzip; of CUDA, ROCm, MTIA, a graph, Triton; with stacks, NCCL or hardly anything in it
    "kineto_docs_after_fix.json", "critical_path/simple_add_input.json.gz", "deepseek_train_h800.json.gz",
    "hta_large_integer.json.gz", "hta_mtia_rank0.json.gz", "hta_nccl_data.json.gz",
    "labelled/sdpa_03_short_seq_overhead.json.gz", "labelled/moe_01_many_experts_few_tokens.json.gz",
    "param_dlrm_8rank_r0.json.gz", "tl_h100_bert_small.json.gz", "tl_h100_owlv2.json.gz",
    "tl_h100_qwen05b.json.gz", "tl_mi300_resnet_actckpt.json.gz", "tl_torch_compile_triton.json.gz",
    "tl_vllm_decode_full_cudagraph.json.gz",
]  # fmt: skip


def test_the_page_has_all_samples() -> None:
    """The table is not empty."""
    assert len(SAMPLES) > 30


@pytest.mark.corpus
@pytest.mark.parametrize("name", SAMPLES)
def test_real_traces(name: str, tmp_path: Path) -> None:
    """Metrics and findings are the same, a second time nothing becomes larger, and the table tells the factor."""
    sample = made_slim(shared(name), FOLDER, tmp_path / "out.json.gz")
    assert sample is not None
    assert sample.slim.changed == ()
    assert sample.factor == pytest.approx(SAMPLES[name], rel=_ZLIB, abs=0.06)
    assert sample.factor >= 2 or sample.packed_bytes < _SMALL
    assert slim_bytes(sample.slim.path) <= sample.slim.bytes


def slim_bytes(path: Path) -> int:
    """Return the size of a slim trace that is made again, without the comparison that follows in `slim`."""
    recorded = read_trace(path)
    parts, renumber = chosen_parts(recorded, diagnose(recorded)), may_renumber(recorded)
    return sum(map(len, trace_bytes(recorded, parts, Names(), renumber=renumber, packed=True)))


@pytest.mark.corpus
@pytest.mark.parametrize("name", ANONYMIZED)
def test_anonymized_real_traces(name: str, tmp_path: Path) -> None:
    """All numbers and findings are the same with stand-ins for names."""
    assert slim(shared(name), tmp_path / "out.json.gz", anonymize=True).changed == ()


def test_owlv2_is_an_eighth() -> None:
    """The trace of a large model, with stacks, is 8 times smaller."""
    assert SAMPLES["tl_h100_owlv2.json.gz"] >= 8
