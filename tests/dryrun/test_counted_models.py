"""Counts of transformers' models, against recorded traces of the same models on an H100."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import instrument
from instrument.explain.metrics.roofline import roofline
from instrument.read.tables.kernel_families import family_of
from instrument.read.tables.table import KERNEL, MEMCPY
from instrument.read.tables.trace import Trace
from instrument.syncs.budget import Budget
from instrument.syncs.counting.counts import counts_of
from instrument.syncs.counting.step_counts import StepCounts
from instrument.syncs.dryrun.run import dry_run_context
from tests.support.shared_traces import shared

transformers = pytest.importorskip("transformers")
Forward = Callable[[], Any]
# What launches the kernels inside of an operator, as a trace names it
INNERMOST = {
    "_to_copy": "copy_", "clone": "copy_", "embedding": "index_select", "convolution": "cudnn_convolution",
    "_scaled_dot_product_flash_attention": "_flash_attention_forward",
    **dict.fromkeys(("scalar_tensor", "zeros", "ones_like", "new_ones"), "fill_"),
}  # fmt: skip
# Operators of a pass when the traces were recorded and now, where transformers changed between
MASK = {"eq": (1, 0), "all": (1, 0), "_local_scalar_dense": (1, 0)}  # read whether it masks anything
CHANGED = {
    "bert": MASK | {"add": (9, 10), "add_": (1, 0), "gather": (0, 1)},  # types of tokens, positions
    "qwen": MASK | {"bmm": (1, 0), "mul": (220, 221), "copy_": (197, 198), "add": (145, 146)},  # rotations, norm
    "owl": {
        # the mask of the text, which each layer added, and positions
        "add": (103, 92), "arange": (2, 5), "bitwise_and": (0, 2), "fill_": (2, 4), "index": (1, 2), "le": (0, 1),
        "lt": (1, 0), "masked_fill_": (2, 0), "sub": (1, 0), "where": (1, 2),
        "copy_": (166, 160),  # the bias of the boxes, which is on the GPU now, and what NOT_COPIED names
    },
}  # fmt: skip
# Bytes that the trace's program copied and ours does not: the bias of the boxes, and a number in each direction
NOT_COPIED = {"H2D": 82944 + 8, "D2H": 8}


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


def launching(trace: Trace) -> Counter[str]:
    """Return how often each operator launched something."""
    rows = np.unique(trace.gpu.operator[trace.gpu.operator >= 0])
    return Counter(
        trace.operators.strings[name].removeprefix("aten::") for name in trace.operators.name[rows].tolist()
    )


def counted(step: StepCounts) -> Counter[str]:
    """Return how often each operator would launch something, by the names that a trace has."""
    found = Counter[str]()
    for call, _, times in step.span.counted():
        if step.prices[call].launches.works:
            name = call.name.removeprefix("aten::")
            found[INNERMOST.get(name, name)] += times
    return found


def copied(trace: Trace) -> Counter[str]:
    """Return the bytes that a trace copied from and to the GPU."""
    found = Counter[str]()
    for name, kind, size in zip(
        trace.gpu.text("name"), trace.gpu.category.tolist(), trace.gpu.bytes.tolist(), strict=True
    ):
        if kind == MEMCPY and "Pageable" in name:
            found["H2D" if "HtoD" in name else "D2H"] += size
    return found


def to_host(outputs: Any) -> None:
    """Copy all results of a model to the CPU."""
    for value in outputs.values():
        if isinstance(value, torch.Tensor):
            value.cpu()
        else:
            to_host(value)


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
    tokens, mask = torch.ones(1, 5, dtype=torch.long), torch.ones(1, 5, dtype=torch.long)
    image = torch.zeros(1, 3, 1008, 1008, dtype=torch.bfloat16)

    def step() -> None:
        given = {"input_ids": tokens, "pixel_values": image, "attention_mask": mask}
        to_host(model(**{name: value.cuda() for name, value in given.items()}))

    return step


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
    """Operations, operators by name and bytes of copies are equal, kernels within a tenth."""
    trace = instrument.read_trace(shared(f"{name}.json.gz"))
    if prepare is not bert:
        request.getfixturevalue("contiguous_heads")
    step = forward(prepare)
    assert roofline(trace).flops == passes * step.flop_count + beside
    then, now = launching(trace), counted(step)
    differ = {name: (then[name] // passes, now[name]) for name in then | now if then[name] != passes * now[name]}
    assert differ == CHANGED[prepare.__name__]
    if prepare is owl:
        bytes_now = Counter({copy.direction: passes * copy.bytes for copy in step.copies})
        assert copied(trace) == bytes_now + Counter({name: passes * size for name, size in NOT_COPIED.items()})
    assert launched(trace).total() == pytest.approx(passes * step.kernel_count, rel=0.1)
