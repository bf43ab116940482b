"""`annotate_step`: optimizer, data, backward, copies, clipping and collectives."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import clip_grad_norm_ as imported_by_name
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import instrument
from instrument.config import settings
from instrument.guard import guard
from instrument.modules.parts import Switch, contexts
from instrument.modules.step import patcher
from instrument.patch import Patch, apply, undo
from instrument.regions import dispatch, region
from tests.conftest import Events
from tests.modules.conftest import AttachEmitter
from tests.support import native, nsys
from tests.support.programs import environment

PATCHED = {
    torch.autograd.profiler.record_function: ["__enter__", "__exit__"],
    torch.no_grad: ["__enter__", "__exit__"],
    torch.autograd: ["backward"],
    torch.Tensor: ["to", "cuda", "copy_"],
    dist.ProcessGroup: [name for name in vars(dist.ProcessGroup) if not name.startswith("__")],
}
BEFORE = {owner: {name: vars(owner).get(name) for name in names} for owner, names in PATCHED.items()}

DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def patched() -> set[str]:
    """Return the names whose objects differ from those at the import of this file."""
    return {
        f"{owner.__name__}.{name}"
        for owner, names in BEFORE.items()
        for name, original in names.items()
        if vars(owner).get(name) is not original
    }


@pytest.fixture(autouse=True)
def no_patch_left() -> Iterator[None]:
    """Fail a test that leaves a patch."""
    yield
    handles, remaining = list(patcher.requests), patched()
    patcher.clear()
    assert not remaining
    assert not handles


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Create a process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Job:
    """A small training job with a scheduler, with the usual steps."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, workers: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.loader = DataLoader(TensorDataset(torch.randn(4, 4), torch.randn(4, 1)), 2, num_workers=workers)
        self.losses: list[float] = []

    def train(self) -> None:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = (self.model(x) - y).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.scheduler.step()
            x.to("meta")
            self.losses.append(loss.item())

    def state(self) -> list[Any]:
        return [*self.losses, *(parameter.tolist() for parameter in self.model.parameters())]


def step(optimizer: str = "AdamW", data: str = DATA) -> list[list[str]]:
    """Return the regions of a step of a job."""
    optimizing = f"Optimizer.zero_grad#{optimizer}.zero_grad", f"Optimizer.step#{optimizer}.step"
    names = (data, optimizing[0], "backward", "clip_grad_norm_", optimizing[1], "copy to meta")
    return [[name] for name in names]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_every_part(attach_emitter: AttachEmitter, kind: type[torch.optim.Optimizer], workers: int) -> None:
    """All parts of a real step are regions, side by side; the last ``__next__`` ends the epoch."""
    job = Job(kind, workers)
    data = DATA.replace("_Single", "_Multi").replace("ProcessData", "ProcessingData") if workers else DATA
    with attach_emitter() as emitter, instrument.annotate_step():
        job.train()
    assert [*step(kind.__name__, data) * 2, [data]] == emitter.tree()


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("optimizer", ["Optimizer.zero_grad#AdamW.zero_grad", "Optimizer.step#AdamW.step"]),
        ("data", [DATA]),
        ("backward", ["backward"]),
        ("copies", ["copy to meta"]),
        ("clipping", ["clip_grad_norm_"]),
        ("collectives", []),
    ],
)
def test_selected_parts(attach_emitter: AttachEmitter, part: str, names: list[str]) -> None:
    """Only the selected part is a region."""
    with attach_emitter() as emitter, instrument.annotate_step(part):
        Job().train()
    assert set(names) == {region.name for region in emitter.regions}


def test_each_part_once_in_a_trace(recorded: Callable[..., Events]) -> None:
    """torch.profiler shows each part once, including the parts that it names itself."""
    job = Job()
    alone = Counter(event["name"] for event in recorded(job.train))
    with instrument.annotate_step():
        names = Counter(event["name"] for event in recorded(job.train))
    assert alone | {"backward": 2, "clip_grad_norm_": 2, "copy to meta": 2} == names
    assert names[DATA] == 3
    assert names["Optimizer.step#AdamW.step"] == 2


def test_torch_and_another_emitter(attach_emitter: AttachEmitter, recorded: Callable[..., Events]) -> None:
    """With torch's profiler and another emitter, both show each part once."""
    with attach_emitter() as emitter, instrument.annotate_step():
        events = recorded(Job().train)
    names = Counter(region.name for region in emitter.regions)
    assert names == Counter(name for (name,) in [*step() * 2, [DATA]])
    assert names == Counter(event["name"] for event in events)


@pytest.mark.parametrize(
    ("name", "target", "shown"), [("nvtx", "NVTX", 0), ("nvtx", "KINETO", 2), ("itt", "NVTX", 2)]
)
def test_ranges_that_torch_emits(
    attach_emitter: AttachEmitter, monkeypatch: pytest.MonkeyPatch, name: str, target: str, shown: int
) -> None:
    """Under emit_nvtx and emit_itt torch emits its own ranges; only other tools receive them from the library."""
    optimizer = Job().optimizer
    with attach_emitter() as emitter, instrument.annotate_step("optimizer"):
        monkeypatch.setattr(type(emitter), "name", name)
        with profile(activities=[ProfilerActivity.CPU]):
            monkeypatch.setattr(dispatch.active, "_target", target)
            optimizer.zero_grad()
            optimizer.step()
        assert shown == len(emitter.regions)
        optimizer.step()
    assert shown + 1 == len(emitter.regions)


@pytest.mark.gpu
@pytest.mark.native
def test_emit_nvtx_shows_no_part_twice() -> None:
    """emit_nvtx shows the optimizer's step itself, and no second range of that name appears."""
    events = native.nvtx_log("""
        import torch, instrument
        weight = torch.ones(1, requires_grad=True, device="cuda")
        optimizer = torch.optim.SGD([weight])
        with instrument.annotate_step(), torch.autograd.profiler.emit_nvtx():
            optimizer.step()
            torch.ones(3).to("cuda")
    """)
    names = [str(r.name).split(",")[0] for r in native.ranges(events)]
    assert (names.count("Optimizer.step#SGD.step"), names.count("copy to cuda:0")) == (1, 1)


PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import instrument
from tests.modules.test_step import Job
with instrument.annotate_step():
    Job().train()
"""


@pytest.mark.native
def test_nvtx() -> None:
    """NVTX has a range for each part, with the bytes of a copy as payload."""
    found = native.ranges(native.nvtx_log(PROGRAM))
    assert [name for (name,) in [*step() * 2, [DATA]]] == [r.name for r in found]
    assert {"copy to meta": 2 * 4 * 4} == {r.name: r.payload for r in found if r.payload is not None}
    assert {("push_pop", "instrument", 0)} == {(r.kind, r.domain, r.depth) for r in found}


@pytest.mark.nsys
def test_nsight_systems(tmp_path: Path) -> None:
    """A report of the real Nsight Systems has the parts."""
    found = nsys.ranges(nsys.profile(PROGRAM, tmp_path=tmp_path).file)
    assert [name for (name,) in [*step() * 2, [DATA]]] == [r.name for r in found]


def test_numbers_are_unchanged(attach_emitter: AttachEmitter) -> None:
    """Losses and parameters are bit-identical."""
    plain, job = Job(), Job()
    plain.train()
    with instrument.annotate_step(), attach_emitter():
        job.train()
    assert plain.state() == job.state()


def test_no_patches_between_recordings(attach_emitter: AttachEmitter) -> None:
    """Functions are patched only while a profiler or a tool is active."""
    handle = instrument.annotate_step()
    for _ in range(2):
        assert not patched()
        with profile(activities=[ProfilerActivity.CPU]):
            assert {"Tensor.to", "ProcessGroup.allreduce", "no_grad.__enter__"} < patched()
        assert not patched()
    with attach_emitter():
        assert patched()
        handle.remove()
        assert not patched()
        handle.remove()
    with attach_emitter():
        assert not patched()


def test_two_handles(attach_emitter: AttachEmitter) -> None:
    """A part of two handles is patched once, until both are removed."""
    optimizer = Job().optimizer
    with attach_emitter() as emitter:
        first, second = (
            instrument.annotate_step("optimizer", "data"),
            instrument.annotate_step("optimizer", "copies"),
        )
        optimizer.step()
        assert len(emitter.regions) == 1
        first.remove()
        optimizer.step()
        assert len(emitter.regions) == 2
        second.remove()
        optimizer.step()
    assert len(emitter.regions) == 2


def test_patches_of_others_stay(attach_emitter: AttachEmitter) -> None:
    """Another tool's patch stays; a stale call through it shows no region, and the next window shows one."""
    handle = instrument.annotate_step("copies")
    with attach_emitter():
        patched_to = torch.Tensor.to
        torch.Tensor.to = lambda *args: patched_to(*args)  # type: ignore[method-assign]
    try:
        with attach_emitter() as emitter:
            torch.ones(1).to("meta")
            assert emitter.tree() == [["copy to meta"]]
            handle.remove()
            torch.ones(1).to("meta")
            assert emitter.tree() == [["copy to meta"]]
    finally:
        del torch.Tensor.to


def test_handle_removed_inside_a_region(attach_emitter: AttachEmitter) -> None:
    """A region that is open when its handle is removed is closed."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    with attach_emitter() as emitter:
        handle = instrument.annotate_step("optimizer")
        optimizer.step(closure=handle.remove)
    assert emitter.tree() == [["Optimizer.step#SGD.step"]]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failing_closure(attach_emitter: AttachEmitter, error: type[BaseException]) -> None:
    """A failing step closes its region, also for an optimizer wrapped by a scheduler."""

    def fail() -> float:
        raise error

    job = Job()
    with attach_emitter() as emitter, instrument.annotate_step(), pytest.raises(error):
        job.optimizer.step(fail)
    assert emitter.tree() == [["Optimizer.step#AdamW.step"]]


@pytest.mark.parametrize("where", ["enter", "exit"])
def test_interrupted_context_manager(attach_emitter: AttachEmitter, where: str) -> None:
    """A region is closed if its context manager is interrupted; a stale patch shows nothing."""

    class Context:
        def __enter__(self) -> None:
            if where == "enter":
                raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            raise KeyboardInterrupt

    shown, switch = region.make("context", None, None, None, None), Switch()
    with attach_emitter() as emitter:
        patches: list[Patch] = []
        apply(contexts(Context, lambda _: dispatch.enter(shown), switch), patches)
        for switch.on in (True, False):
            with pytest.raises(KeyboardInterrupt), Context():
                pass
        assert emitter.tree() == [["context"]]
    undo(patches)


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise KeyboardInterrupt


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from (1, 2)


def test_end_of_data_and_errors(attach_emitter: AttachEmitter) -> None:
    """The end of the data and errors in it propagate, and close the region."""
    with attach_emitter() as emitter, instrument.annotate_step("data"):
        batches = iter(DataLoader(Numbers(), batch_size=None))
        assert [1, 2] == [next(batches), next(batches)]
        with pytest.raises(StopIteration):
            next(batches)
        with pytest.raises(KeyboardInterrupt):
            next(iter(DataLoader(Failing())))
    assert emitter.tree() == [[DATA]] * 4


def test_clipping(attach_emitter: AttachEmitter) -> None:
    """Both clipping functions are regions, however they were imported; a failing one closes its region."""
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.tensor([float("inf")])
    with attach_emitter() as emitter, instrument.annotate_step("clipping"):
        with pytest.raises(RuntimeError, match="non-finite"):
            imported_by_name([weight], 1.0, error_if_nonfinite=True)
        torch.nn.utils.clip_grad_value_([weight], 1.0)
        with torch.no_grad():
            torch.nn.utils.get_total_norm([weight.grad])
    assert emitter.tree() == [["clip_grad_norm_"], ["clip_grad_value_"]]
    assert weight.grad.item() == 1


COPIES: list[tuple[Callable[[torch.Tensor], Any], list[str]]] = [
    (lambda x: x.to("meta"), ["copy to meta"]),
    (lambda x: x.to(torch.device("meta"), torch.float16, non_blocking=True), ["copy to meta"]),
    (lambda x: x.to(device="meta"), ["copy to meta"]),
    (lambda x: x.to(torch.empty(1, device="meta")), ["copy to meta"]),
    (lambda x: x.to(tensor=torch.empty(1, device="meta")), ["copy to meta"]),
    (lambda x: torch.empty(3, device="meta").copy_(x), ["copy to meta"]),
    (lambda x: nn.Parameter(x).to("meta"), ["copy to meta"]),
    (lambda x: x.to(torch.float16), []),
    (lambda x: x.to("cpu", copy=True), []),
    (lambda x: x.to(copy=True, dtype=torch.float64), []),
    (lambda x: torch.empty(3).copy_(x), []),
    (lambda x: torch.empty(3, device="meta").to("meta", copy=True), []),
]


@pytest.mark.parametrize(("call", "names"), COPIES)
def test_copies(attach_emitter: AttachEmitter, call: Callable[[torch.Tensor], Any], names: list[str]) -> None:
    """Moving a tensor off the CPU is a copy region with its bytes; other conversions are not regions."""
    x = torch.ones(3)
    expected = call(x)
    with attach_emitter() as emitter, instrument.annotate_step("copies"):
        result = call(x)
    assert names == [region.name for region in emitter.regions]
    assert all(region.payload == 12 for region in emitter.regions)
    assert (type(result), result.device, result.dtype) == (type(expected), expected.device, expected.dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that cannot copy to CUDA")
@pytest.mark.parametrize("call", [lambda x: x.cuda(), lambda x: x.to("cuda"), lambda x: x.cuda(1)])
def test_failing_copy(attach_emitter: AttachEmitter, call: Callable[[torch.Tensor], Any]) -> None:
    """A failing copy raises torch's own error, and its region is closed."""
    with pytest.raises(Exception) as alone:
        call(torch.ones(1))
    with attach_emitter() as emitter, instrument.annotate_step("copies"), pytest.raises(alone.type) as annotated:
        call(torch.ones(1))
    assert str(annotated.value) == str(alone.value)
    assert emitter.tree() in ([["copy to cuda:0"]], [["copy to cuda:1"]])


@pytest.mark.parametrize("arguments", [("nowhere",), (3.5,), (), (None, 7, 8, 9, 10)])
def test_wrong_copy_arguments(
    attach_emitter: AttachEmitter, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...]
) -> None:
    """Wrong arguments raise torch's own error, and are not reported as an internal error."""
    monkeypatch.setattr(guard, "failed", lambda *_: pytest.fail("reported"))

    def outcome() -> str:
        try:
            return str(torch.ones(1).to(*arguments))
        except Exception as error:
            return repr(error)

    expected = outcome()
    with attach_emitter() as emitter, instrument.annotate_step("copies"):
        assert expected == outcome()
    assert emitter.tree() == []


class Overriding(torch.Tensor):
    """Records torch's calls of ``__torch_function__``."""

    calls: list[tuple[Any, ...]] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append((func, types, len(args), kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_torch_function_receives_the_originals(attach_emitter: AttachEmitter) -> None:
    """Subclasses and modes that override functions receive torch's original functions, once each."""

    def use() -> list[tuple[Any, ...]]:
        Overriding.calls = []
        tensor = torch.ones(2).as_subclass(Overriding)
        assert type(tensor.to("meta", non_blocking=True)) is Overriding
        torch.ones(2).to(tensor)
        tensor.copy_(torch.ones(2))
        return Overriding.calls

    expected = use()
    with attach_emitter(), instrument.annotate_step("copies"):
        assert expected == use()
    assert expected[0][0] is torch.Tensor.to


def test_copies_under_a_default_device(attach_emitter: AttachEmitter) -> None:
    """A copy under a default device, which is a torch function mode, is a region."""
    x = torch.ones(2)
    with attach_emitter() as emitter, instrument.annotate_step("copies"), torch.device("cpu"):
        x.to("meta")
    assert emitter.tree() == [["copy to meta"]]


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty(4)], x),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.empty(4), x),
    "gather": lambda x: dist.gather(x, [torch.empty(4)]),
    "scatter": lambda x: dist.scatter(x, [torch.ones(4)]),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, [torch.ones(4)]),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, torch.ones(4)),
    "all_to_all_single": lambda x: dist.all_to_all_single(x, torch.ones(4)),
    "barrier": lambda _: dist.barrier(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(attach_emitter: AttachEmitter, name: str) -> None:
    """Each function that starts a collective is a region of its name, with the same result."""
    expected, x = torch.arange(4.0), torch.arange(4.0)
    COLLECTIVES[name](expected)
    with attach_emitter() as emitter, instrument.annotate_step("collectives"):
        COLLECTIVES[name](x)
    assert emitter.tree() == [[name]]
    assert torch.equal(x, expected)


@pytest.mark.usefixtures("group")
def test_failing_collective(attach_emitter: AttachEmitter) -> None:
    """A collective that fails closes its region."""
    with attach_emitter() as emitter, instrument.annotate_step(), pytest.raises((ValueError, RuntimeError)):
        dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4))
    assert emitter.tree() == [["all_gather"]]


RANKS = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist, instrument
from torch.distributed import all_reduce
dist.init_process_group("gloo")
rank = dist.get_rank()
with instrument.annotate_step(), instrument.profile(sys.argv[1], schedule=instrument.schedule("1")) as prof:
    for step in range(3):
        x = torch.ones(4) * rank
        all_reduce(x)
        objects = [rank]
        dist.broadcast_object_list(objects, 0)
        if rank:
            dist.send(x, 0)
        else:
            dist.recv(x, 1)
        prof.step()
assert x.tolist() == [1, 1, 1, 1] and objects == [0]
dist.barrier()
time.sleep(0.5)
os._exit(0)  # gloo sometimes aborts at exit: "terminate called without an active exception"
"""


def test_two_ranks(tmp_path: Path) -> None:
    """In a job of two ranks each trace has the collectives of its own step, once."""
    from tests.conftest import annotations

    script = tmp_path / "job.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run([*command, str(tmp_path / "out")], check=True, env=environment(), timeout=100)
    traces = sorted((tmp_path / "out").rglob("rank*.json*"))
    assert len(traces) == 2
    for trace, transfer in zip(traces, ("recv", "send"), strict=True):
        names = Counter(event["name"] for event in annotations(trace))
        assert {"all_reduce": 1, "broadcast": 2, transfer: 1} == {
            name: count for name, count in names.items() if name in ("all_reduce", "broadcast", "recv", "send")
        }


def test_compiled_step(attach_emitter: AttachEmitter) -> None:
    """A compiled step is not compiled again when a window opens or closes.

    The backend of this test runs the graph's operators in Python, so copies among them are visible.
    """
    torch._dynamo.reset()
    counter = CompileCounter()
    job = Job(torch.optim.SGD)
    parameters = list(job.model.parameters())
    job.model(torch.ones(1, 4)).sum().backward()

    @torch.compile(backend=counter)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        job.optimizer.step()
        return x.to(torch.float64) + x.to("meta").shape[0] + torch.zeros(2, dtype=torch.float64).copy_(x)

    x = torch.ones(2)
    compiled(x)
    compiled(x)
    before = counter.frame_count
    assert before
    with instrument.annotate_step():
        for _ in range(2):
            with attach_emitter() as emitter:
                compiled(x)
            assert {"copy to meta"} == {region.name for region in emitter.regions}
            compiled(x)
    assert before == counter.frame_count


def test_compiled_in_a_window(attach_emitter: AttachEmitter) -> None:
    """Code compiled while a tool is attached is one graph and is not compiled again."""
    torch._dynamo.reset()
    counter = CompileCounter()
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_([weight], 1.0) + x.to(torch.float64) + x.to("meta").shape[0]

    with instrument.annotate_step(), attach_emitter():
        compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert counter.frame_count == 1


def test_unbound_method_in_compiled_code(attach_emitter: AttachEmitter) -> None:
    """Code compiled in a window may call a patched method as a function."""
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.Tensor.to(x, "meta")

    with instrument.annotate_step("copies"), attach_emitter():
        assert compiled(torch.ones(1)).is_meta


def named(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("scripted"), torch.no_grad():
        return x.to(torch.float64) + 1


def test_scripted_in_a_window(tmp_path: Path) -> None:
    """TorchScript compiles the patched context managers from their own source."""
    script = tmp_path / "program.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import torch, instrument
from tests.modules.test_step import named
from torch.profiler import profile
with instrument.annotate_step(), profile():
    assert torch.jit.script(named)(torch.ones(1)).item() == 2
    assert torch.jit.trace(named, torch.ones(1))(torch.ones(1)).item() == 2
""")
    native.run([sys.executable, "-W", "ignore", script], environment())


def test_no_patches_at_exit(tmp_path: Path) -> None:
    """Nothing is patched any more when the interpreter exits."""
    script = tmp_path / "program.py"
    script.write_text(
        "import atexit, torch\n"
        "before = torch.Tensor.to\n"
        "atexit.register(lambda: print(torch.Tensor.to is before))\n"
        "import instrument\n"
        "instrument.annotate_step()\n"
        "instrument.configure(emitters=['torch', 'nvtx'])\n"
        "print(torch.Tensor.to is before)\n"
    )
    assert native.run([sys.executable, script], environment()).stdout.split() == ["False", "True"]


def test_instrument_0(attach_emitter: AttachEmitter, monkeypatch: pytest.MonkeyPatch) -> None:
    """With INSTRUMENT=0 nothing is patched, and the handle has no effect."""
    monkeypatch.setattr(settings, "enabled", False)
    with attach_emitter(), instrument.annotate_step() as handle:
        assert not patched()
        handle.remove()


def test_ways_to_call_backward(attach_emitter: AttachEmitter) -> None:
    """Every way to start a backward pass accepts its arguments; a failing pass closes its region."""
    with attach_emitter() as emitter, instrument.annotate_step("backward"):
        weight = torch.ones(2, requires_grad=True)
        torch.autograd.backward(tensors=[(weight * 2).sum()])
        torch.autograd.backward((weight * 2), torch.ones(2), retain_graph=True)
        with pytest.raises(RuntimeError, match="scalar"):
            (weight * 2).backward()
        (weight * 2).backward(torch.ones(2), inputs=[weight])
    assert emitter.tree() == [["backward"]] * 4
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0, 6.0]


def test_wrong_parts() -> None:
    """Unknown parts raise an error at once, with the accepted ones."""
    with pytest.raises(ValueError, match=r"\"parts\" must be from optimizer, data, .*: 'forward'"):
        instrument.annotate_step("data", "forward")
    with pytest.raises(TypeError, match=r'"parts" must be strings .*: 3'):
        instrument.annotate_step(3)  # type: ignore[arg-type]


def test_repr_of_the_handle() -> None:
    """The repr of a handle names its parts."""
    with instrument.annotate_step("data", "copies") as handle:
        assert repr(handle) == "<regions of data, copies>"
