"""The Megatron adapter on the real megatron-core: regions, steps, and `detach`."""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from instrument.integrations.megatron import attach, core
from instrument.read.jobs.read import read_file
from instrument.read.measures.summary import summarize
from tests.support import nsys, warm
from tests.support.programs import environment as clean
from tests.support.programs import python, run

pytest.importorskip("megatron.core")
from tests.integrations.megatron_support import FOLDER, PATH, SCRIPT, losses, outline, recorded_steps

pytestmark = pytest.mark.framework

# The script, alone, under torchrun and under nsys

IMPORTS = ("megatron.core.models.gpt.gpt_model", "megatron.core.optimizer", "megatron.core.pipeline_parallel")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    command = python(SCRIPT, ["--cpu", "--out", str(tmp_path_factory.mktemp("plain"))])
    return losses(warm.run(command, clean({"INSTRUMENT": "0"}), check=True, imports=IMPORTS).stdout)


STEP = """\
ProfilerStep
  forward
    data
    GPTModel
      models.common.embeddings.language_model_embedding.forward
      TransformerBlock
        TransformerLayer
          transformer.transformer_layer._forward_attention.self_attention
            transformer.attention.forward.qkv
          transformer.transformer_layer._forward_mlp.mlp
            transformer.mlp.forward.linear_fc1
        TransformerLayer
          transformer.transformer_layer._forward_attention.self_attention
            transformer.attention.forward.qkv
          transformer.transformer_layer._forward_mlp.mlp
            transformer.mlp.forward.linear_fc1
  backward
    GPTModel (backward)
      TransformerBlock (backward)
        TransformerLayer (backward)
        TransformerLayer (backward)
  forward
    data
    GPTModel
      models.common.embeddings.language_model_embedding.forward
      TransformerBlock
        TransformerLayer
          transformer.transformer_layer._forward_attention.self_attention
            transformer.attention.forward.qkv
          transformer.transformer_layer._forward_mlp.mlp
            transformer.mlp.forward.linear_fc1
        TransformerLayer
          transformer.transformer_layer._forward_attention.self_attention
            transformer.attention.forward.qkv
          transformer.transformer_layer._forward_mlp.mlp
            transformer.mlp.forward.linear_fc1
  backward
    GPTModel (backward)
      TransformerBlock (backward)
        TransformerLayer (backward)
        TransformerLayer (backward)
  finalize_model_grads
    finish_grad_sync
  optimizer
    Optimizer.step#AdamW.step
"""


SHOWN = (
    r"ProfilerStep.*|forward|backward|data|finalize_model_grads|finish_grad_sync|optimizer|Optimizer\.step.*|GPTModel.*"
    r"|Transformer.*|megatron.*(embedding\.forward|self_attention|qkv|mlp|linear_fc1)"
)


def test_regions_of_a_step(plain: list[str], tmp_path: Path) -> None:
    """The trace has the expected tree for each step, and the losses are bit-identical."""
    done = warm.run(python(SCRIPT, ["--cpu", "--out", str(tmp_path)]), clean(), check=True, imports=IMPORTS)
    assert losses(done.stdout) == plain
    assert len(plain) == 6
    found = "\n".join(outline(tmp_path, SHOWN)) + "\n"
    assert re.sub(r"ProfilerStep#\d", "ProfilerStep", found) == STEP * 2
    (entry,) = map(json.loads, (tmp_path / "manifest.jsonl").read_text().splitlines())
    assert (entry["status"], entry["steps"]) == ("recorded", [2, 3])


def two_ranks(script_args: list[str], env: dict[str, str]) -> str:
    command = python(SCRIPT, ["--cpu", *script_args])
    return warm.run(command, clean(env), check=True, ranks=2, imports=IMPORTS).stdout


def test_interleaved_pipeline(tmp_path: Path) -> None:
    """Two ranks with two model chunks each show micro-batches and their communication in each phase."""
    args = ["--pipeline", "2", "--chunks", "2", "--iterations", "4", "--out", str(tmp_path)]
    annotated = losses(two_ranks(args, {}))
    assert annotated == losses(two_ranks(args, {"INSTRUMENT": "0"}))
    assert len(annotated) == 4

    shown = r"ProfilerStep.*|forward|backward|megatron.*(warmup|steady|cooldown)"
    phases = [re.sub(r"#\d|\S*interleaving\.", "", line) for line in outline(tmp_path, shown, rank=1)]
    steady = ["  steady", *2 * ["    forward", "    backward"]]
    cooldown = ["  cooldown", *2 * ["    backward"]]
    assert phases == 2 * ["ProfilerStep", "  warmup", *2 * ["    forward"], *steady, *cooldown]
    everything = [line.strip() for rank in (0, 1) for line in outline(tmp_path, f"forward|{PATH}pipe.*", rank)]
    counts = Counter(everything)
    assert counts["forward"] == 2 * 2 * 4  # ranks, steps, micro-batches of two chunks
    assert counts["pipeline_parallel.p2p_communication.send_forward_recv_forward"] > 0


@pytest.mark.nsys
def test_nsight_systems(plain: list[str], tmp_path: Path) -> None:
    """The report has the ranges with micro-batch and stage, and none of Megatron's own ranges in addition."""
    report = nsys.profile(SCRIPT, tmp_path=tmp_path, args=["--cpu"], imports=IMPORTS)
    assert losses(report.stdout) == plain
    ranges = nsys.ranges(report.file)
    forward = [found for found in ranges if found.name == "forward"]
    assert [(found.payload, found.category) for found in forward] == 6 * [(0, "stage 0"), (1, "stage 0")]
    assert [found.payload for found in ranges if found.name == "backward"] == 6 * [0, 1]
    mlp = [found for found in ranges if found.name == f"{PATH}transformer.transformer_layer._forward_mlp.mlp"]
    assert [(found.domain, found.parent) for found in mlp] == 24 * [("instrument", "TransformerLayer")]
    assert {found.domain for found in ranges} == {"instrument"}


# In this process: the real megatron.core on the CPU


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """Return the script as a module, with one process in the group."""
    sys.path.insert(0, str(FOLDER))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("train")
    sys.path.remove(str(FOLDER))
    yield module
    for name in ("train", "cpu"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def parallel(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    script.parallel_state.initialize_model_parallel(1, 1)
    yield
    script.parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def train(
    script: ModuleType, optimizer: Any = None, iterations: int = 5, on_step: Callable[[], None] | None = None
) -> Any:
    """Train in a loop of megatron.core's parts; return the losses."""
    with script.no_cuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        (model,) = script.build(1, 1)
        config = script.OptimizerConfig(lr=1e-2, use_distributed_optimizer=False)
        optimizer = optimizer(model) if optimizer else script.get_megatron_optimizer(config, [model])
        found = []
        for _ in range(iterations):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            data = iter(torch.randint(script.VOCABULARY, (2, 2, script.LENGTH), generator=torch.manual_seed(1)))
            out = script.get_forward_backward_func()(
                forward_step_func=script.forward_step, data_iterator=data, model=model, num_microbatches=2,
                seq_length=script.LENGTH, micro_batch_size=2, forward_only=False,
            )  # fmt: skip
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad
            optimizer.step()
            if on_step is not None:
                on_step()
            found.append(sum(loss["loss"].item() for loss in out))
        return found


def replaceable_attributes() -> dict[str, Any]:
    """Return everything that can be replaced, by name."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.") or module_name in ("train", "__main__"):
            for name, value in vars(module).items():
                found[f"{module_name}.{name}"] = value
                if isinstance(value, type) and value.__module__ == module_name:
                    found |= {f"{module_name}.{name}.{inner}": what for inner, what in vars(value).items()}
    return {name: value for name, value in found.items() if callable(value) or isinstance(value, staticmethod)}


@pytest.mark.parametrize("kind", ["megatron", "torch", "explicit", "explicit too"])
def test_steps_of_a_loop(kind: str, script: ModuleType, parallel: None, tmp_path: Path) -> None:
    """Each optimizer step is one step, however steps are counted, and all patches are undone."""
    plain = train(script, (lambda model: torch.optim.SGD(model.parameters(), 0.1)) if kind == "torch" else None)
    before = replaceable_attributes()
    with attach(tmp_path, wait=1, warmup=0, active=2, repeat=2, first_step=10) as attached:
        own = {"torch": lambda model: torch.optim.SGD(model.parameters(), 0.1)}.get(kind)
        assert train(script, own, on_step=attached.step if kind.startswith("explicit") else None) == plain
    assert recorded_steps(attached) == [[11, 12]]
    assert [entry["steps"] for entry in attached.windows] == [[11, 12], [14, 14]]
    after = replaceable_attributes()
    assert [name for name in before if after[name] is not before[name]] == []


def test_second_adapter(script: ModuleType, parallel: None, tmp_path: Path) -> None:
    """A second adapter detaches the first; both record."""
    first = attach(tmp_path / "a", wait=0, warmup=0, active=1)
    train(script, iterations=2)
    second = attach(tmp_path / "b", wait=0, warmup=0, active=1)
    train(script, iterations=2)
    second.detach()
    first.detach()
    assert (recorded_steps(first), recorded_steps(second)) == ([[0, 0]], [[0, 0]])
    assert outline(tmp_path / "b", "forward|backward|optimizer") == [*2 * ["forward", "backward"], "optimizer"]


@pytest.mark.usefixtures("lenient")
def test_failures_of_the_library(
    script: ModuleType, parallel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of this library does not change the losses."""

    def fail(*_: object) -> None:
        raise RuntimeError("internal")

    plain = train(script)
    for name in ("label_forward", "remember", "label_backward"):
        monkeypatch.setattr(core.Microbatches, name, fail)
    monkeypatch.setattr(core, "hook_get_batch", fail)
    with attach(tmp_path, wait=0, active=2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(script) == plain


def test_error_in_a_step(
    script: ModuleType, parallel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error reaches the caller; no region stays open, and all patches are undone."""
    mlp = importlib.import_module("megatron.core.transformer.mlp").MLP
    before = replaceable_attributes()

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), attach(tmp_path, wait=0, warmup=0, active=5) as attached:
        monkeypatch.setattr(mlp, "forward", fail)
        train(script)
    assert [entry["status"] for entry in attached.windows] == ["partial"]
    assert len(attached.ranges) == 0
    monkeypatch.undo()
    assert replaceable_attributes() == before
    shown = r"forward|TransformerLayer|megatron.*layer.*"
    layer = "transformer.transformer_layer._forward_"
    assert outline(tmp_path, shown) == ["forward", "  TransformerLayer", *(f"    {layer}{part}" for part in (
        "attention.self_attention", "attention.self_attn_bda", "mlp.mlp"))]  # fmt: skip


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """The script trains on the GPU, and its regions have GPU time."""
    env = {"OMP_NUM_THREADS": "1"}
    plain = run(python(SCRIPT, ["--out", str(tmp_path / "plain")]), clean({"INSTRUMENT": "0", **env}))
    done = run(python(SCRIPT, ["--out", str(tmp_path / "out")]), clean(env))
    annotated, without = ([float(loss) for loss in losses(each.stdout)] for each in (done, plain))
    assert annotated == pytest.approx(without, rel=1e-3)  # kernels may add up in another order
    (file,) = (tmp_path / "out" / "window-0001").glob("rank0.*")
    gpu_ns = {region.path[-1]: region.gpu_ns or 0 for region in summarize(read_file(file)).regions}
    assert min(gpu_ns[name] for name in ("forward", "backward", "optimizer", "TransformerLayer")) > 0
