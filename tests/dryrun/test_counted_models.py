"""Counts of transformers' models, against recorded traces of the same models on an H100."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import instrument
from instrument.explain.metrics.roofline import roofline
from instrument.read.tables.kernel_families import family_of
from instrument.read.tables.table import KERNEL
from instrument.read.tables.trace import Trace
from instrument.syncs.budget import Budget
from instrument.syncs.counting.counts import counts_of
from instrument.syncs.counting.step_counts import StepCounts
from instrument.syncs.dryrun.run import dry_run_context
from tests.support.shared_traces import shared

transformers = pytest.importorskip("transformers")
Forward = Callable[[], Any]
COMMON = ("addmm", "mm", "native_layer_norm", "gelu", "silu", "_softmax", "mean", "rsqrt", "convolution")


def forward(prepare: Callable[[], Forward]) -> StepCounts:
    """Return the counts of one forward pass, without data."""
    with dry_run_context(True, Budget(None)) as run, torch.no_grad():
        step = run.call(prepare)
        assert run.state.calls is not None
        before = len(run.state.calls.record)
        run.call(step)
    if run.error is not None:
        raise run.error
    record = run.state.calls.record
    del record.order[: 2 * before]
    record.marks[:] = [(0, 1)]
    report = run.report()
    return counts_of(record, 1, lambda step: 0, report.counts.compiled).step  # type: ignore[union-attr]


def launched(trace: Trace) -> Counter[str]:
    """Return the kernels by family, of those whose launch the trace has."""
    gpu = trace.gpu
    rows = zip(gpu.name.tolist(), gpu.category.tolist(), gpu.operator.tolist(), strict=True)
    return Counter(family_of(gpu.strings[name]) for name, kind, by in rows if kind == KERNEL and by >= 0)


def operators(trace: Trace) -> Counter[str]:
    names = [trace.operators.strings[name] for name in trace.operators.name.tolist()]
    return Counter(name.removeprefix("aten::") for name in names if name.removeprefix("aten::") in COMMON)


def bert() -> Forward:
    config = transformers.BertConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048, vocab_size=30522
    )
    model = transformers.BertForMaskedLM(config).to("cuda", torch.bfloat16).eval()
    tokens = torch.ones(1, 141, dtype=torch.long, device="cuda")
    return lambda: model(input_ids=tokens)


def qwen() -> Forward:
    config = transformers.Qwen2Config(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=151936,
    )  # fmt: skip
    model = transformers.Qwen2Model(config).to("cuda", torch.bfloat16).eval()
    tokens = torch.ones(16, 559, dtype=torch.long, device="cuda")
    return lambda: model(input_ids=tokens, attention_mask={"full_attention": None}, use_cache=False)


def owl() -> Forward:
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = transformers.Owlv2Config(
        text_config=text, vision_config=vision | {"image_size": 1008, "patch_size": 14}, projection_dim=768
    )
    model = transformers.Owlv2ForObjectDetection._from_config(config, attn_implementation="eager")
    model = model.to("cuda", torch.bfloat16).eval()
    tokens = torch.ones(1, 5, dtype=torch.long, device="cuda")
    image = torch.zeros(1, 3, 1008, 1008, dtype=torch.bfloat16, device="cuda")
    return lambda: model(input_ids=tokens, pixel_values=image, attention_mask=torch.ones_like(tokens))


@pytest.fixture
def contiguous_heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copy query, key and value, as transformers did when the traces were recorded."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.owlv2 import modeling_owlv2

    def copying(attend: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            return attend(module, q.contiguous(), k.contiguous(), v.contiguous(), *args, **kwargs)

        return run

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setattr(modeling_owlv2, "eager_attention_forward", copying(modeling_owlv2.eager_attention_forward))
    ALL_ATTENTION_FUNCTIONS["sdpa"] = copying(before)
    yield
    ALL_ATTENTION_FUNCTIONS["sdpa"] = before


@pytest.mark.parametrize(
    ("name", "prepare", "passes", "beside"),
    [
        ("tl_h100_bert_small", bert, 1, 0),
        # then a bmm of 1 x 32 by 1 x 559 made the angles of the positions, today a multiplication
        ("tl_h100_qwen05b", qwen, 1, 2 * 32 * 559),
        ("tl_h100_owlv2", owl, 5, 0),
    ],
)
def test_recorded_models(
    request: pytest.FixtureRequest, name: str, prepare: Callable[[], Forward], passes: int, beside: int
) -> None:
    """Operations and operators of layers are equal, kernels within a tenth."""
    trace = instrument.read_trace(shared(f"{name}.json.gz"))
    if prepare is not bert:
        request.getfixturevalue("contiguous_heads")
    step = forward(prepare)
    assert roofline(trace).flops == passes * step.flop_count + beside
    counted = {row.name.removeprefix("aten::"): passes * row.operators for row in step.by("operator")}
    assert operators(trace) == {name: number for name, number in counted.items() if name in COMMON}
    assert launched(trace).total() == pytest.approx(passes * step.kernel_count, rel=0.1)
