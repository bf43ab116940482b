"""`annotate_step`: clipping, copies, collectives, compiled code and wrong arguments."""

from __future__ import annotations

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

import instrument
from instrument.base.config import settings
from instrument.base.guard import guard
from tests.modules.conftest import AttachEmitter
from tests.modules.step_parts import Job, patched
from tests.support import native, warm
from tests.support.programs import environment
from tests.support.torch_versions import compiles_clipping

pytestmark = pytest.mark.usefixtures("no_patch_left")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Create a process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    try:
        COLLECTIVES[name](expected)
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
        pytest.skip(str(error))
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


@pytest.mark.process
def test_two_ranks(tmp_path: Path) -> None:
    """In a job of two ranks each trace has the collectives of its own step, once."""
    from tests.conftest import annotations

    script = tmp_path / "job.py"
    script.write_text(RANKS)
    command = [sys.executable, script, tmp_path / "out"]
    warm.run(command, environment(), timeout=100, check=True, ranks=2)
    traces = sorted((tmp_path / "out").rglob("rank*.pt.trace.json*"))
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
    called = set() if compiles_clipping() else {"clip_grad_norm_"}
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
            assert {"copy to meta"} | called == {region.name for region in emitter.regions}
            compiled(x)
    assert before == counter.frame_count


def test_compiled_in_a_window(attach_emitter: AttachEmitter) -> None:
    """Code compiled while a tool is attached is one graph and is not compiled again."""
    if not compiles_clipping():
        pytest.skip("this version of torch breaks the graph at clip_grad_norm_")
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


@pytest.mark.process
def test_scripted_in_a_window(tmp_path: Path) -> None:
    """TorchScript compiles the patched context managers from their own source."""
    script = tmp_path / "program.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import torch, instrument
from tests.modules.test_step_calls import named
from torch.profiler import profile
with instrument.annotate_step(), profile():
    assert torch.jit.script(named)(torch.ones(1)).item() == 2
    assert torch.jit.trace(named, torch.ones(1))(torch.ones(1)).item() == 2
""")
    native.run([sys.executable, "-W", "ignore", script], environment())


@pytest.mark.process
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
