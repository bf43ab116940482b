"""megatron-core and megatron.training: what `attach` shows of them, and that it is gone afterwards."""

from __future__ import annotations

import contextlib
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
from hypothesis import given
from hypothesis import strategies as st

from instrument.config import RUN
from instrument.integrations import environment
from instrument.integrations.megatron import MegatronAdapter, attach, core, install
from instrument.regions import dispatch, region
from instrument.traces.read import read_file
from instrument.traces.summary import summarize
from tests.conftest import annotations
from tests.support import megatron_training, nsys
from tests.support.programs import ROOT, python, run
from tests.support.programs import environment as clean

pytest.importorskip("megatron.core")
FOLDER = ROOT / "integrations" / "megatron"
SCRIPT = FOLDER / "train.py"
PATH = "megatron.core."


def outline(folder: Path, keep: str, rank: int = 0) -> list[str]:
    """The regions of the first window whose names match, indented by how they nest, of the main thread."""
    (file,) = (folder / "window-0001").glob(f"rank{rank}.*")
    events = [event for event in annotations(file) if re.fullmatch(keep, event["name"])]
    lines, open_ends = [], []
    for event in events:
        open_ends = [end for end in open_ends if end > event["ts"]]
        lines.append("  " * len(open_ends) + event["name"].replace(PATH, ""))
        open_ends.append(event["ts"] + event["dur"])
    return lines


def recorded_steps(attachment: MegatronAdapter) -> list[Any]:
    return [entry["steps"] for entry in attachment.windows if entry["status"] == "recorded"]


def losses(text: str) -> list[str]:
    return re.findall(r"loss (\S+)", text)


# The script, run by hand, under torchrun and under nsys.


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    env = clean({"INSTRUMENT": "0", "OMP_NUM_THREADS": "1"})
    done = run(python(SCRIPT, ["--cpu", "--out", str(tmp_path_factory.mktemp("plain"))]), env)
    return losses(done.stdout)


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
    """The script's trace is the expected tree for each step, and its losses are those without us, bit by bit."""
    env = clean({"OMP_NUM_THREADS": "1"})
    done = run(python(SCRIPT, ["--cpu", "--out", str(tmp_path)]), env)
    assert losses(done.stdout) == plain
    assert len(plain) == 6
    found = "\n".join(outline(tmp_path, SHOWN)) + "\n"
    assert re.sub(r"ProfilerStep#\d", "ProfilerStep", found) == STEP * 2
    (entry,) = map(json.loads, (tmp_path / "manifest.jsonl").read_text().splitlines())
    assert (entry["status"], entry["steps"]) == ("recorded", [2, 3])


def torchrun(script_args: list[str], env: dict[str, str]) -> str:
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        SCRIPT,
        "--cpu",
        *script_args,
    ]
    return run([sys.executable, *command], clean({"OMP_NUM_THREADS": "1", **env})).stdout


def test_interleaved_pipeline(tmp_path: Path) -> None:
    """Two ranks with two chunks each: micro-batches and their communication, each in the phase it is of."""
    args = ["--pipeline", "2", "--chunks", "2", "--iterations", "4", "--out", str(tmp_path)]
    annotated = losses(torchrun(args, {}))
    assert annotated == losses(torchrun(args, {"INSTRUMENT": "0"}))
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
    """The ranges are in the report, with micro-batch and stage, and Megatron's own are not drawn a second time."""
    report = nsys.profile(SCRIPT, tmp_path=tmp_path, args=["--cpu"], env={"OMP_NUM_THREADS": "1"})
    assert losses(report.stdout) == plain
    ranges = nsys.ranges(report.file)
    forward = [found for found in ranges if found.name == "forward"]
    assert [(found.payload, found.category) for found in forward] == 6 * [(0, "stage 0"), (1, "stage 0")]
    assert [found.payload for found in ranges if found.name == "backward"] == 6 * [0, 1]
    mlp = [found for found in ranges if found.name == f"{PATH}transformer.transformer_layer._forward_mlp.mlp"]
    assert [(found.domain, found.parent) for found in mlp] == 24 * [("instrument", "TransformerLayer")]
    assert {found.domain for found in ranges} == {"instrument"}


# In this process: the real megatron.core on the CPU.


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script as a module, with one process in the group."""
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
    script: ModuleType, optimizer: Any = None, iterations: int = 5, told: Callable[[], None] | None = None
) -> Any:
    """A loop of megatron.core's own parts; returns the losses."""
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
            if told is not None:
                told()
            found.append(sum(loss["loss"].item() for loss in out))
        return found


def everything_of_megatrons() -> dict[str, Any]:
    """What can be replaced, by name."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.") or module_name in ("train", "__main__"):
            for name, value in vars(module).items():
                found[f"{module_name}.{name}"] = value
                if isinstance(value, type) and value.__module__ == module_name:
                    found |= {f"{module_name}.{name}.{inner}": what for inner, what in vars(value).items()}
    return {name: value for name, value in found.items() if callable(value) or isinstance(value, staticmethod)}


@pytest.mark.parametrize("kind", ["megatron", "torch", "told", "told too"])
def test_steps_of_a_loop(kind: str, script: ModuleType, parallel: None, tmp_path: Path) -> None:
    """Each optimizer step is one step, whoever tells, and what was replaced is put back."""
    plain = train(script, (lambda model: torch.optim.SGD(model.parameters(), 0.1)) if kind == "torch" else None)
    before = everything_of_megatrons()
    with attach(tmp_path, wait=1, warmup=0, active=2, repeat=2, first_step=10) as attached:
        own = {"torch": lambda model: torch.optim.SGD(model.parameters(), 0.1)}.get(kind)
        assert train(script, own, told=attached.step if kind.startswith("told") else None) == plain
    assert recorded_steps(attached) == [[11, 12]]
    assert [entry["steps"] for entry in attached.windows] == [[11, 12], [14, 14]]
    after = everything_of_megatrons()
    assert [name for name in before if after[name] is not before[name]] == []


def test_second_use(script: ModuleType, parallel: None, tmp_path: Path) -> None:
    """Another call takes the place of the first; both record."""
    first = attach(tmp_path / "a", wait=0, warmup=0, active=1)
    train(script, iterations=2)
    second = attach(tmp_path / "b", wait=0, warmup=0, active=1)
    train(script, iterations=2)
    second.detach()
    first.detach()
    assert (recorded_steps(first), recorded_steps(second)) == ([[0, 0]], [[0, 0]])
    assert outline(tmp_path / "b", "forward|backward|optimizer") == [*2 * ["forward", "backward"], "optimizer"]


@pytest.mark.usefixtures("lenient")
def test_failure_of_ours(
    script: ModuleType, parallel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on, with the same losses."""

    def fail(*_: object) -> None:
        raise RuntimeError("ours")

    plain = train(script)
    for name in ("label_forward", "remember", "label_backward"):
        monkeypatch.setattr(core.Microbatches, name, fail)
    monkeypatch.setattr(core, "get_batch", fail)
    with attach(tmp_path, wait=0, active=2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(script) == plain


def test_error_in_a_step(
    script: ModuleType, parallel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the caller; nothing stays open, on or replaced."""
    mlp = importlib.import_module("megatron.core.transformer.mlp").MLP
    before = everything_of_megatrons()

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), attach(tmp_path, wait=0, warmup=0, active=5) as attached:
        monkeypatch.setattr(mlp, "forward", fail)
        train(script)
    assert [entry["status"] for entry in attached.windows] == ["partial"]
    assert len(attached.ranges) == 0
    monkeypatch.undo()
    assert everything_of_megatrons() == before
    shown = r"forward|TransformerLayer|megatron.*layer.*"
    layer = "transformer.transformer_layer._forward_"
    assert outline(tmp_path, shown) == ["forward", "  TransformerLayer", *(f"    {layer}{part}" for part in (
        "attention.self_attention", "attention.self_attn_bda", "mlp.mlp"))]  # fmt: skip


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """The script trains without the CPU's help, and its regions have GPU time."""
    env = {"OMP_NUM_THREADS": "1"}
    plain = run(python(SCRIPT, ["--out", str(tmp_path / "plain")]), clean({"INSTRUMENT": "0", **env}))
    done = run(python(SCRIPT, ["--out", str(tmp_path / "out")]), clean(env))
    with_us, without = ([float(loss) for loss in losses(each.stdout)] for each in (done, plain))
    assert with_us == pytest.approx(without, rel=1e-3)  # kernels may add up in another order
    (file,) = (tmp_path / "out" / "window-0001").glob("rank0.*")
    gpu_ns = {region.path[-1]: region.gpu_ns or 0 for region in summarize(read_file(file)).regions}
    assert min(gpu_ns[name] for name in ("forward", "backward", "optimizer", "TransformerLayer")) > 0


# Megatron's own ranges.


class Recorder:
    """An emitter that nests ranges as NVTX does: what is closed is what was opened last."""

    name = "recorder"

    def __init__(self) -> None:
        self.open: list[str] = []
        self.trace: list[str] = []

    def push(self, shown: region.Region) -> str:
        self.trace.append("  " * len(self.open) + shown.name)
        self.open.append(shown.name)
        return shown.name

    def pop(self, name: str) -> None:
        assert self.open.pop() == name

    start, end, mark = push, pop, push


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    dispatch.active.add(recorder)
    yield recorder
    dispatch.active.remove(recorder)


Program = list[Any]
NAMES = st.sampled_from("ab")
PROGRAMS = st.recursive(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "push suffix", "pop suffix"]), NAMES), max_size=4),
    lambda inner: st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["push", "pop", "push suffix", "pop suffix"]), NAMES),
            st.tuples(st.sampled_from(["call", "call that raises"]), inner),
        ),
        max_size=5,
    ),
    max_leaves=12,
)


def test_balanced_whatever_they_do() -> None:
    """Pushes without pops, pops of others or of none, exceptions: ranges nest, and all end with what is around."""
    from megatron.core import utils

    around = region.make("around", None, None, None, None)

    def execute(program: Program, recorder: Recorder) -> None:
        for action, what in program:
            if action.startswith("call"):
                with contextlib.suppress(KeyError):
                    execute(what, recorder)
                    if "raises" in action:
                        raise KeyError
            else:
                function = utils.nvtx_range_push if action.startswith("push") else utils.nvtx_range_pop
                before = list(recorder.open)
                function(**{"suffix" if "suffix" in action else "msg": what})
                if action.startswith("pop"):  # nothing but it and what is inside is closed
                    assert before[: len(recorder.open)] == recorder.open
                else:
                    assert recorder.open[-1].endswith(what)

    with attach(at=1000) as attached:

        @given(program=PROGRAMS)
        def check(program: Program) -> None:
            recorder = Recorder()
            dispatch.active.add(recorder)
            try:
                with attached.ranges.around(around, sys._getframe()):
                    execute(program, recorder)
                    assert recorder.open[0] == "around"
                assert recorder.open == []
            finally:
                dispatch.active.remove(recorder)

        check()


def test_returned_early(recorder: Recorder) -> None:
    """A range that a function left open is over when the function is, by the next range at the latest."""
    from megatron.core.utils import nvtx_range_pop, nvtx_range_push

    def early() -> None:
        nvtx_range_push(suffix="mlp")

    def proper() -> None:
        nvtx_range_push(suffix="bda")
        nvtx_range_push("message")
        nvtx_range_pop("message")
        nvtx_range_pop(suffix="bda")

    with attach(at=1000) as attached:
        nvtx_range_push, nvtx_range_pop = (
            vars(sys.modules["megatron.core.utils"])[name] for name in ("nvtx_range_push", "nvtx_range_pop")
        )
        for _ in range(2):
            early()
            proper()
        assert len(attached.ranges) == 0
    module = __name__
    assert recorder.trace == 2 * [f"{module}.early.mlp", f"{module}.proper.bda", "  message"]


def test_imported_by_name(recorder: Recorder) -> None:
    """Whoever imported the functions before or after, calls ours while attached, and theirs afterwards."""
    from megatron.core import utils
    from megatron.core.transformer import mlp

    theirs = mlp.nvtx_range_push
    module = ModuleType("late")
    with attach(at=1000):
        assert mlp.nvtx_range_push is utils.nvtx_range_push is not theirs
        sys.modules["late"] = module
        exec("from megatron.core.utils import nvtx_range_push", vars(module))
        assert vars(module)["nvtx_range_push"] is not theirs
    assert mlp.nvtx_range_push is utils.nvtx_range_push is vars(module)["nvtx_range_push"] is theirs
    del sys.modules["late"]


def test_their_nvtx_is_on(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their ranges turned on nothing shows twice: torch.cuda.nvtx is not called."""
    from megatron.core import utils

    called: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", called.append)
    utils.configure_nvtx_profiling(True)
    try:
        with attach(at=1000):
            utils.nvtx_range_push("range")
            utils.nvtx_range_pop("another")  # which theirs raises ValueError for
            utils.nvtx_range_pop("range")
            utils.nvtx_range_pop("range")  # and RuntimeError
    finally:
        utils.configure_nvtx_profiling(False)
    assert (called, recorder.trace, recorder.open) == ([], ["range"], [])


def test_decorated(recorder: Recorder) -> None:
    """What Megatron decorates is a region, decorated before or after, with its message, and not afterwards."""
    from megatron.core import utils
    from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

    apply = lambda: SwiGLUFunction.apply(torch.ones(2, 4), False, False)  # noqa: E731
    before = vars(SwiGLUFunction)["forward"]
    with attach(at=1000):

        @utils.nvtx_decorator(message="late", color="no such colour")
        def late() -> None:
            pass

        late()
        apply()
    late()
    apply()
    assert recorder.trace == ["late", f"{PATH}fusions.fused_bias_swiglu.forward"]
    assert vars(SwiGLUFunction)["forward"] is before


# megatron.training.


class Training:
    """A model, what trains it, and ``megatron.training`` of the tests' own making."""

    def __init__(self) -> None:
        self.module = importlib.import_module("megatron.training.training")
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.fail_at: int | None = None

    def forward_step(self, data: Any, model: torch.nn.Module) -> torch.Tensor:
        return model(next(data)).mean()

    def forward_backward(self, forward_step_func: Any, data_iterator: Any, model: Any) -> float:
        if self.module.get_args().curr_iteration == self.fail_at:
            raise ZeroDivisionError
        loss = forward_step_func(data_iterator, model[0])
        loss.backward()
        return loss.item()

    def pretrain(self, **args: Any) -> list[float]:
        data = iter(lambda: torch.ones(2, 4), None)
        found: list[float] = self.module.pretrain(
            self.forward_step, [self.model], self.optimizer, self.forward_backward, data, **args
        )
        return found


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``megatron.training`` can be imported, and was not."""
    megatron_training.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    for name in ("megatron.training.training", "megatron.training"):
        sys.modules.pop(name, None)
    vars(sys.modules["megatron"]).pop("training", None)


PROFILE = {"profile": True, "profile_step_start": 10, "profile_step_end": 12, "train_iters": 14}


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        (PROFILE, [[10, 11]]),
        (PROFILE | {"use_pytorch_profiler": True}, [[10, 11]]),
        (PROFILE | {"iteration": 10}, [[10, 11]]),
        (PROFILE | {"iteration": 11}, [[11, 11]]),
        (PROFILE | {"iteration": 100, "profile_step_start": 110, "profile_step_end": 112, "train_iters": 115},
         [[110, 111]]),
        (PROFILE | {"iterations_to_skip": [4, 5], "train_iters": 12}, [[10, 11]]),
        (PROFILE | {"old_release": True, "iteration": 9}, [[10, 11]]),
        (PROFILE | {"train_iters": 12}, [[10, 11]]),
        (PROFILE | {"profile_step_start": 0, "profile_step_end": 1}, [[0, 0]]),
        (PROFILE | {"iteration": 13}, []),
        (PROFILE | {"profile_ranks": [1, 2]}, []),
        (PROFILE | {"profile_ranks": [0]}, [[10, 11]]),
    ],
    ids=str,
)  # fmt: skip
def test_profile_arguments(package: None, tmp_path: Path, args: dict[str, Any], steps: list[Any]) -> None:
    """The iterations from start up to end are recorded, also on resume, and not by Megatron as well."""
    with attach(tmp_path / "out", modules=False) as attached:
        training = Training()
        training.pretrain(**args)
    recorded = [entry["steps"] for entry in attached.windows if entry["status"] in ("recorded", "partial")]
    assert recorded == steps
    assert training.module.own_profilers == []
    assert training.module.get_args().profile is True


def test_profile_with_a_plan(package: None, tmp_path: Path) -> None:
    """A plan of ours is followed instead, still by one profiler."""
    with (
        attach(tmp_path / "out", wait=2, warmup=0, active=1, modules=False) as attached,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        training = Training()
        training.pretrain(**PROFILE)
    assert recorded_steps(attached) == [[2, 2]]
    assert training.module.own_profilers == []


@pytest.mark.parametrize("torchs", [False, True])
def test_profile_of_nothing(package: None, tmp_path: Path, torchs: bool) -> None:
    """Arguments that name no iteration are Megatron's own to answer."""
    args = PROFILE | {"profile_step_end": 10, "use_pytorch_profiler": torchs, "train_iters": 11}
    with attach(tmp_path / "out", modules=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training()
        training.pretrain(**args)
    assert training.module.own_profilers == ["torch" if torchs else "cuda"]


@pytest.mark.parametrize("imported", ["before", "after"])
def test_regions_of_an_iteration(package: None, tmp_path: Path, imported: str) -> None:
    """A step is the call of train_step; evaluation and checkpoint follow it, in the same window."""
    training = Training() if imported == "before" else None
    with attach(tmp_path / "out", wait=1, warmup=0, active=2) as attached:
        training = training or Training()
        found = training.pretrain(train_iters=5, eval_interval=3, save_interval=2)
    shown = r"ProfilerStep.*|step|evaluation|checkpoint|Optimizer.step.*|Linear"
    step = ["  step", "    Linear", "    Optimizer.step#SGD.step"]
    assert outline(tmp_path / "out", shown) == [
        "ProfilerStep#1", *step, "  checkpoint", "ProfilerStep#2", *step, "  evaluation", "    Linear"
    ]  # fmt: skip
    assert recorded_steps(attached) == [[1, 2]]
    assert found == Training().pretrain(train_iters=5, eval_interval=3)


def test_last_iteration(package: None, tmp_path: Path) -> None:
    """A window that the training ends in holds the last iteration; a second training goes on counting."""
    with attach(tmp_path / "out", wait=1, warmup=0, active=3, repeat=2, modules=False) as attached:
        training = Training()
        training.pretrain(train_iters=3)
        assert attached.windows[0]["steps"] == [1, 2]
        training.pretrain(iteration=3, train_iters=9)
    assert attached.windows[-1]["steps"] == [5, 7]


def test_error_in_an_iteration(package: None, tmp_path: Path) -> None:
    """It reaches the caller; the profiler is off, nothing is open, and what was recorded is kept."""
    with attach(tmp_path / "out", wait=1, warmup=0, active=4) as attached:
        training = Training()
        training.fail_at = 3
        with pytest.raises(ZeroDivisionError):
            training.pretrain(**PROFILE)
        assert not torch.autograd._profiler_enabled()
        assert [(entry["status"], entry["steps"]) for entry in attached.windows] == [("partial", [1, 2])]
        training.fail_at = None
        training.pretrain()
    assert training.module.train_step.__wrapped__ if hasattr(training.module.train_step, "__wrapped__") else True
    assert training.module.train_step.__module__ == training.module.__name__
    assert not hasattr(training.module.train_step, "__wrapped__")


# How it begins.


def test_by_environment(package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lenient: None) -> None:
    """`install` drives the loop that the environment asks for, and gives way to `attach`."""
    arguments = {"out": str(tmp_path / "out"), "wait": 0, "warmup": 0, "active": 1, "modules": False}
    monkeypatch.setenv(RUN, json.dumps(arguments))
    for cache in (environment.loop_from_environment, install):
        cache.cache_clear()
    try:
        install()
        install()
        training = Training()
        training.pretrain(train_iters=3)
        loop = environment.loop_from_environment()
        assert loop is not None
        assert [entry["steps"] for entry in loop.windows] == [[0, 0]]
        with attach(tmp_path / "own", wait=0, warmup=0, active=1, modules=False) as attached:
            training.pretrain(train_iters=3)
        assert recorded_steps(attached) == [[0, 0]]
        assert not hasattr(training.module.train_step, "__wrapped__")
    finally:
        monkeypatch.undo()
        for cache in (environment.loop_from_environment, install):
            cache.cache_clear()
        if MegatronAdapter._current is not None:
            MegatronAdapter._current.detach()


def test_nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the environment variable nothing is attached."""
    monkeypatch.delenv(RUN, raising=False)
    for cache in (environment.loop_from_environment, install):
        cache.cache_clear()
    install()
    install.cache_clear()
    assert MegatronAdapter._current is None


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong ones fail at once; so does a missing Megatron, with the cure."""
    with pytest.raises(ValueError, match='"first_step" must be an integer >= 0: -1'):
        attach(first_step=-1)
    with pytest.raises(ValueError, match='"modules" must be'):
        attach(modules=-1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install megatron-core"):
        attach()
