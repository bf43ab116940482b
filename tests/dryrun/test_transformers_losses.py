"""Models of Transformers, which initializes and loads on the meta device, have the CPU's loss in a dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from instrument import dry_run

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.framework,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU"),
]

TOKENS = 64
_COMMON: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def _tokens(count: int = 12) -> torch.Tensor:
    return torch.randint(3, TOKENS, (2, count), generator=torch.Generator().manual_seed(1))


def _text() -> dict[str, Any]:
    return {"input_ids": _tokens(), "labels": _tokens(), "attention_mask": torch.ones(2, 12, dtype=torch.long)}


def _image() -> torch.Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


# The class that a script loads the model with, its configuration, and a batch
MODELS: dict[str, tuple[str, Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "bert": ("AutoModelForMaskedLM", lambda: transformers.BertConfig(**_COMMON), _text),
    "roberta": ("AutoModelForMaskedLM", lambda: transformers.RobertaConfig(**_COMMON), _text),
    "distilbert": (
        "AutoModelForMaskedLM",
        lambda: transformers.DistilBertConfig(
            vocab_size=TOKENS, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=64
        ),
        _text,
    ),
    "gpt2": (
        "AutoModelForCausalLM",
        lambda: transformers.GPT2Config(
            vocab_size=TOKENS, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
        ),
        _text,
    ),
    "llama": ("AutoModelForCausalLM", lambda: transformers.LlamaConfig(**_GROUPED), _text),
    "mistral": ("AutoModelForCausalLM", lambda: transformers.MistralConfig(**_GROUPED), _text),
    "qwen2": ("AutoModelForCausalLM", lambda: transformers.Qwen2Config(**_GROUPED), _text),
    "opt": (
        "AutoModelForCausalLM",
        lambda: transformers.OPTConfig(**_COMMON, ffn_dim=64, word_embed_proj_dim=32),
        _text,
    ),
    "mamba": (
        "AutoModelForCausalLM",
        lambda: transformers.MambaConfig(vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, state_size=4),
        lambda: {"input_ids": _tokens(), "labels": _tokens()},
    ),
    "t5": (
        "AutoModelForSeq2SeqLM",
        lambda: transformers.T5Config(
            vocab_size=TOKENS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        _text,
    ),
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        lambda: transformers.WhisperConfig(
            **{key: value for key, value in _COMMON.items() if key.endswith("_id") or key == "vocab_size"},
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=8,
            max_target_positions=32, decoder_start_token_id=1,
        ),
        lambda: {
            "input_features": torch.rand(2, 8, 16, generator=torch.Generator().manual_seed(1)),
            "labels": _tokens(),
        },
    ),
    "vit": (
        "AutoModelForImageClassification",
        lambda: transformers.ViTConfig(**_VISION, num_labels=5),
        lambda: {"pixel_values": _image(), "labels": torch.tensor([1, 4])},
    ),
    "clip": (
        "AutoModel",
        lambda: transformers.CLIPConfig(
            text_config=_COMMON, vision_config=_VISION, projection_dim=16
        ),
        lambda: {"input_ids": _tokens(), "pixel_values": _image(), "return_loss": True},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence Transformers, which logs through its own handler."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(before)


def _from_config(kind: Any, config: Any, folder: Path, device: str) -> Any:
    return kind.from_config(config).to(device)


def _from_pretrained(kind: Any, config: Any, folder: Path, device: str) -> Any:
    return kind.from_pretrained(folder).to(device)


def _onto_the_device(kind: Any, config: Any, folder: Path, device: str) -> Any:
    pytest.importorskip("accelerate")
    return kind.from_pretrained(folder, device_map=device)


def _on_the_device(kind: Any, config: Any, folder: Path, device: str) -> Any:
    with torch.device(device):
        return kind.from_config(config)


def _emptied(kind: Any, config: Any, folder: Path, device: str) -> Any:
    """Allocate a model of the meta device, and load the weights and buffers that ``folder`` has."""
    with torch.device("meta"):
        model = kind.from_config(config)
    model.to_empty(device=device)
    state = torch.load(folder / "state.pt", map_location=device)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    for name, buffer in model.named_buffers():
        buffer.copy_(state[name])
    return model


WAYS: dict[str, Callable[..., Any]] = {
    "from_config": _from_config, "from_pretrained": _from_pretrained, "device_map": _onto_the_device,
    "on the device": _on_the_device, "to_empty": _emptied,
}  # fmt: skip


def losses(build: Callable[[], Any], batch: dict[str, Any], device: str) -> list[float]:
    """Return the losses before and after one training step, with all parts that draw random numbers."""
    torch.manual_seed(0)
    model = build().train()
    assert {device} == {each.device.type for each in [*model.parameters(), *model.buffers()]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return [loss.item(), model(**batch).loss.item()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a saved model."""

    def folder(name: str) -> Path:
        kind, config, _ = MODELS[name]
        path = tmp_path_factory.getbasetemp() / f"model-{name}"
        if not path.exists():
            torch.manual_seed(1)
            model = getattr(transformers, kind).from_config(config())
            model.save_pretrained(path)
            torch.save({**dict(model.named_buffers()), **model.state_dict()}, path / "state.pt")
        return path

    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_losses(name: str, way: str, saved: Callable[[str], Path]) -> None:
    """A model trains with the CPU's losses, to the last digit, however it is created."""
    kind, config, batch = MODELS[name]
    folder = saved(name)

    def run(device: str) -> list[float]:
        build = WAYS[way]
        return losses(lambda: build(getattr(transformers, kind), config(), folder, device), batch(), device)

    seen: list[float] = []
    report = dry_run(lambda: seen.extend(run("cuda")))
    if report.error is not None:
        raise report.error
    assert run("cpu") == seen
    assert seen[0] > 0
    assert [] == report.not_covered
