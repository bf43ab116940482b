"""`annotate_generation`: prefill and decode of real models, with unchanged tokens."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    CompileConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.utils import GenerationMixin

import instrument
from instrument.integrations import generation
from instrument.integrations.transformers import InstrumentCallback, annotate_generation
from tests.conftest import Events
from tests.integrations.trees import counts
from tests.integrations.trees import recorded as in_windows

pytestmark = pytest.mark.framework

PARTS = ["generate", "prefill", "decode", "GPT2LMHeadModel"]
TOKENS = 4
ANSWER = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}


def attributes(kind: type) -> dict[str, Any]:
    """Return the attributes of a class, except those that Transformers itself caches there."""
    return {name: value for name, value in vars(kind).items() if not name.endswith("_cached_value")}


@pytest.fixture(autouse=True)
def classes_are_restored() -> Iterator[None]:
    before = [attributes(kind) for kind in (GenerationMixin, GPT2LMHeadModel)]
    yield
    assert before == [attributes(kind) for kind in (GenerationMixin, GPT2LMHeadModel)]
    assert [] == generation.generation.requests


@pytest.fixture
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 64, "n_embd": 8, "n_layer": 2, "n_head": 1}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)).eval()


PROMPT = torch.arange(1, 11)[None]


def generate(model: Any, **arguments: Any) -> list[list[int]]:
    torch.manual_seed(0)
    tokens: list[list[int]] = model.generate(PROMPT, **{**ANSWER, **arguments}).tolist()
    return tokens


def parts(events: Events) -> list[tuple[str, int]]:
    """Return each prefill and decode, with the number of model calls in it."""
    calls = [event["ts"] for event in events if event["name"] == "GPT2LMHeadModel"]
    return [
        (event["name"], sum(event["ts"] <= start < event["ts"] + event["dur"] for start in calls))
        for event in events
        if event["name"] in ("prefill", "decode")
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [("prefill", 1)] + [("decode", 1)] * (TOKENS - 1)),
        ({"do_sample": True}, [("prefill", 1)] + [("decode", 1)] * (TOKENS - 1)),
        ({"num_beams": 3}, [("prefill", 1)] + [("decode", 1)] * (TOKENS - 1)),
        ({"num_beams": 3, "do_sample": True}, [("prefill", 1)] + [("decode", 1)] * (TOKENS - 1)),
        ({"use_cache": False}, [("prefill", 1)] + [("decode", 1)] * (TOKENS - 1)),
        ({"prefill_chunk_size": 4}, [("prefill", 3)] + [("decode", 1)] * (TOKENS - 1)),
        ({"cache_implementation": "static"}, [("prefill", 1)] + [("decode", 1)] * (TOKENS - 1)),
        ({"max_new_tokens": 1, "min_new_tokens": 1}, [("prefill", 1)]),
    ],
)
def test_prefill_and_decode(
    model: GPT2LMHeadModel,
    recorded: Callable[..., Events],
    arguments: dict[str, Any],
    expected: list[tuple[str, int]],
) -> None:
    """The prompt is the prefill, and each later token a decode; the tokens are unchanged."""
    plain = generate(model, **arguments)
    answers = []
    with annotate_generation(model), instrument.annotate_modules(model, 0, modes=False):
        events = recorded(lambda: answers.append(generate(model, **arguments)))
    assert expected == parts(events)
    assert [plain] == answers
    assert 1 == [event["name"] for event in events].count("generate")


def test_assisted_decoding(model: GPT2LMHeadModel, recorded: Callable[..., Events]) -> None:
    """A decode verifies several tokens at once, and excludes the assistant's drafting."""
    assistant = copy.deepcopy(model)
    plain = generate(model, assistant_model=assistant)
    answers = []
    with annotate_generation(model), instrument.annotate_modules(model, 0, modes=False):
        events = recorded(lambda: answers.append(generate(model, assistant_model=assistant)))
    found = parts(events)
    assert ("prefill", 1) == found[0]
    assert {("decode", 1)} >= {*found[1:]}
    assert len(found) <= TOKENS
    assert [plain] == answers


def test_encoder_and_decoder(recorded: Callable[..., Events]) -> None:
    """In an encoder-decoder model, the prefill is the first step of the decoder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 8, "d_ff": 8, "d_kv": 8, "num_layers": 1, "num_heads": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)).eval()
    plain = generate(model)
    answers = []
    with annotate_generation(model):
        events = recorded(lambda: answers.append(generate(model)))
    assert ["generate", "prefill", *["decode"] * (TOKENS - 1)] == [event["name"] for event in events]
    assert [plain] == answers


def test_compiled_decoding(model: GPT2LMHeadModel) -> None:
    """With a static cache the decode is compiled once, whether regions are shown or not."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(backend=backend, fullgraph=True, dynamic=False, mode=None)
    config._compile_all_devices = True  # by default only for GPUs
    arguments = {"cache_implementation": "static", "compile_config": config}
    without = generate(model, **arguments)
    compiled = len(graphs)
    with annotate_generation(model):
        assert without == generate(model, **arguments)
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            assert without == generate(model, **arguments)
    assert without == generate(model, **arguments)
    assert 0 < compiled == len(graphs)
    names = [event.name for event in prof.events()]
    assert {"prefill": 1, "decode": TOKENS - 1} == {name: names.count(name) for name in ("prefill", "decode")}


def test_only_this_model(model: GPT2LMHeadModel, recorded: Callable[..., Events]) -> None:
    """Other models of the class, copies, and the model itself after `remove` have no regions."""
    with annotate_generation(model):
        other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        torch.save(model, io.BytesIO())
        assert [] == recorded(lambda: generate(other))
    assert [] == recorded(lambda: generate(model))


def test_two_handles(model: GPT2LMHeadModel, recorded: Callable[..., Events]) -> None:
    """With two handles on one model each part is one region, and either handle may be removed first."""
    first, second = annotate_generation(model), annotate_generation(model)
    assert 1 == [event["name"] for event in recorded(lambda: generate(model))].count("generate")
    first.remove()
    assert 1 == [event["name"] for event in recorded(lambda: generate(model))].count("generate")
    second.remove()
    assert [] == recorded(lambda: generate(model))


def test_error_closes_regions(model: GPT2LMHeadModel, recorded: Callable[..., Events]) -> None:
    """A stopping criterion that raises in the second decode leaves no region open."""

    def stop(tokens: torch.Tensor, _: Any) -> bool:
        if tokens.shape[1] == PROMPT.shape[1] + 3:
            raise RuntimeError("lost")
        return False

    def run() -> None:
        with pytest.raises(RuntimeError, match="lost"):
            generate(model, stopping_criteria=[stop])
        with instrument.annotate("after"):
            pass

    with annotate_generation(model):
        events = recorded(run)
    assert ["generate", "prefill", "decode", "decode", "after"] == [event["name"] for event in events]
    end = {event["name"]: event["ts"] + event["dur"] for event in events}
    assert end["decode"] <= end["generate"] <= end["after"]


@pytest.mark.usefixtures("lenient")
def test_failures_of_the_library(model: GPT2LMHeadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure to open a region does not change the tokens."""
    plain = generate(model)

    def broken(name: str) -> Any:
        if name != "generate":
            raise RuntimeError("internal")
        return annotate(name)

    annotate = instrument.annotate
    with annotate_generation(model), profile(activities=[ProfilerActivity.CPU]):
        monkeypatch.setattr(instrument, "annotate", broken)
        assert plain == generate(model)


def test_wrong_models() -> None:
    """A model that cannot generate is rejected at once."""
    with pytest.raises(TypeError, match=r'"model" must be a torch.nn.Module: 3'):
        annotate_generation(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'"model" must have generate\(\), .*: Linear'):
        annotate_generation(torch.nn.Linear(1, 1))


def test_predict_with_generate(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    """An evaluation with ``predict_with_generate`` has generation regions."""

    class Tokens(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": PROMPT[0], "labels": PROMPT[0]}

    args = Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=1, eval_on_start=True, per_device_eval_batch_size=1, predict_with_generate=True,
        generation_max_length=PROMPT.shape[1] + 3, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    callback = InstrumentCallback(tmp_path / "out", wait=0, warmup=0, active=1)
    given = {"train_dataset": Tokens(), "eval_dataset": Tokens(), "compute_metrics": lambda _: {}}
    Seq2SeqTrainer(model, args, callbacks=[callback], **given).train()
    expected = {"evaluation": 1, "generate": 2, "prefill": 2, "decode": 4}
    assert expected == counts(in_windows(tmp_path / "out"), expected)
