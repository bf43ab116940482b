"""Dry runs that check where tensors are, with and without data."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import instrument
from instrument import dry_run

from .reports import both, finished, gpu, notes, ops

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


# ------------------------------------------------------------------------------------------ where things are


@both
@pytest.mark.parametrize(
    ("where", "on_gpu", "loads"),
    [
        (None, True, 2),
        ("cuda", True, 2),
        (torch.device("cuda"), True, 2),
        ("cpu", False, 0),
        ({"cuda:0": "cpu"}, False, 0),
        (lambda storage, place: storage, False, 0),
    ],
    ids=["none", "text", "device", "cpu", "table", "function"],
)
def test_load_into(fake: bool, where: Any, on_gpu: bool, loads: int) -> None:
    """A checkpoint is loaded to its device or the requested one; only copies to the GPU synchronize."""

    def step() -> None:
        file = io.BytesIO()
        with instrument.allow_sync("set up"):
            torch.save(nn.Linear(3, 3, device="cuda").state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert [on_gpu] * 2 == [value.is_cuda for value in loaded.values()]

    assert ({"load": loads} if loads else {}) == ops(finished(step, fake=fake))


@both
def test_pickled_modules(fake: bool) -> None:
    """An unpickled module is on the GPU again."""

    def step() -> None:
        with instrument.allow_sync("pickled"):
            model = pickle.loads(pickle.dumps(nn.Linear(3, 3, device="cuda")))
        assert model.weight.is_cuda
        model.weight.sum().item()

    assert {"item": 1} == ops(finished(step, fake=fake))


@both
def test_shared_memory(fake: bool) -> None:
    """Sharing memory does nothing for tensors on the GPU."""

    def step() -> None:
        value, model = gpu(3), nn.Linear(3, 3, device="cuda")
        assert value.share_memory_() is value
        assert model.share_memory() is model

    report = finished(step, fake=fake)
    assert ([], []) == (report.syncs, report.not_covered)


HEADS = (2, 2, 8, 8)
MIXED: dict[str, Callable[[], Any]] = {
    "add": lambda: gpu(3) + torch.ones(3),
    "linear": lambda: nn.Linear(3, 3, device="cuda")(torch.ones(2, 3)),
    "cat": lambda: torch.cat([gpu(3), torch.ones(3)]),
    "foreach": lambda: torch._foreach_add([gpu(3)], [torch.ones(3)]),
    "query": lambda: functional.scaled_dot_product_attention(torch.ones(HEADS), gpu(*HEADS), gpu(*HEADS)),
    "key": lambda: functional.scaled_dot_product_attention(gpu(*HEADS), torch.ones(HEADS), gpu(*HEADS)),
    "value of flash": lambda: functional.scaled_dot_product_attention(
        gpu(*HEADS).half(), gpu(*HEADS).half(), torch.ones(HEADS).half()
    ),
    "mask": lambda: functional.scaled_dot_product_attention(*[gpu(*HEADS)] * 3, torch.ones(8, 8)),
    "rms norm": lambda: functional.rms_norm(gpu(2, 3), (3,), torch.ones(3)),
}


@both
@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices(fake: bool, name: str) -> None:
    """A call that a GPU would refuse is carried out, and fails the run."""
    report = finished(MIXED[name], fake=fake)
    assert report.not_covered, report
    assert "takes tensors on the CPU and on the GPU, which raises an error on a GPU" in notes(report)[0]
    with pytest.raises(AssertionError, match="would not run on a GPU"):
        report.assert_max(99)


@both
def test_cpu_scalars(fake: bool) -> None:
    """Tensors of one number may be on the CPU, as on a GPU."""

    def step() -> None:
        gpu(3) * torch.tensor(2.0)
        gpu(3).clamp(torch.tensor(0.0), torch.tensor(1.0))

    finished(step, fake=fake).assert_max(0)


def test_model_named_with_batches_on_the_cpu() -> None:
    """A model that is named in ``on_gpu``, with batches that stay on the CPU, fails."""
    model, optimizer = nn.Linear(3, 1), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 3).to("cpu")).sum().backward()
        optimizer.step()

    assert "would not run on a GPU" in str(finished(step, on_gpu=[model, optimizer]).over(9))


OPTIMIZERS: list[Callable[[Any], Any]] = [
    torch.optim.AdamW,
    lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    torch.optim.Adagrad,
    torch.optim.LBFGS,
]


@both
@pytest.mark.parametrize("make", OPTIMIZERS, ids=["AdamW", "SGD", "Adagrad", "LBFGS"])
def test_earlier_optimizer_state(fake: bool, make: Callable[[Any], Any]) -> None:
    """The state of an optimizer is where its parameters are, even if ``on_gpu`` names only the model."""
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, unnamed = make(model.parameters()), torch.optim.AdamW(other.parameters())

    def loss(where: str = "cuda") -> torch.Tensor:
        optimizer.zero_grad()
        out = model(torch.ones(2, 3, device=where)).sum()
        out.backward()
        return out

    optimizer.step(lambda: loss("cpu"))
    other(torch.ones(3)).sum().backward()
    unnamed.step()

    def step() -> None:
        held = unnamed.state[other.weight]["exp_avg"]
        assert not held.is_cuda
        optimizer.step(loss)

    assert [] == finished(step, fake=fake, on_gpu=[model]).not_covered


def test_earlier_copy_of_the_model() -> None:
    """A copy of the model, such as an average of its weights, must be named; the message says so."""
    model = nn.Linear(3, 1)
    average = copy.deepcopy(model)

    def step() -> None:
        with torch.no_grad():
            torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.1)

    reason = str(finished(step, on_gpu=[model]).over(9))
    assert reason.startswith("would not run on a GPU: _foreach_lerp_ takes tensors on the CPU and on the GPU")
    assert "are on the CPU unless on_gpu names them: on_gpu=[model, batch, optimizer]" in reason
    finished(step, on_gpu=[model, average]).assert_max(0)


device = "cuda" if torch.cuda.is_available() else "cpu"


def test_earlier_choice_of_device() -> None:
    """The message explains a device that the program chose before the run, when it saw no GPU."""
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        (model(torch.ones(2, 3).to(device)).sum() - torch.zeros(1, device=device)).backward()
        optimizer.step()

    line = inspect.getsourcelines(step)[1] + 1
    report = finished(step, on_gpu=[model, optimizer])
    assert 1 == len(report.not_covered)
    assert str(report.over(9)).startswith("the device was chosen before the dry run began, without a GPU, so ")
    assert f"test_placement.py:{line} uses the CPU. Choose the device inside the step" in str(report.over(9))
    assert "uses the CPU: if the device was chosen" in dry_run(step).unavailable_reason

    def by_mistake() -> None:
        model(torch.ones(2, 3, device="cpu")).sum().backward()

    assert str(finished(by_mistake, on_gpu=[model]).over(9)).startswith("would not run on a GPU: addmm takes")


def test_exchanged() -> None:
    """DLPack and storages keep the device of a tensor."""

    def step() -> None:
        value = gpu(3)
        out = torch.from_dlpack(value)
        assert out.is_cuda
        assert (2, 0) == tuple(map(int, value.__dlpack_device__()))
        out.sum().item()
        value.untyped_storage().cpu()
        torch.ones(3).untyped_storage().cuda()
        value.untyped_storage().cuda()

    assert {"item": 1, "cpu": 1, "cuda": 1} == ops(finished(step))


def test_one_module_is_enough() -> None:
    """``on_gpu`` accepts one module, optimizer or tensor without a list."""
    model = nn.Linear(3, 1)
    for named in (model, torch.optim.SGD(model.parameters(), lr=0.1), model.weight):
        assert {"item": 1} == ops(finished(lambda: model.weight.sum().item(), on_gpu=named))


@both
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_formatted(fake: bool, kind: Any) -> None:
    """Formatting or printing a tensor of any shape reads it once."""

    def step() -> None:
        for shape in ((), (3,), (2, 2)):
            value = torch.zeros(shape, device="cuda")
            value = value if kind is torch.Tensor else nn.Parameter(value)
            f"{value}"
            "{}".format(value)  # noqa: UP032
            format(value)
            print(value, file=io.StringIO())
            str(value)
            repr(value)

    assert {"format": 9, "print": 9} == ops(finished(step, fake=fake))


@both
def test_new_with_data(fake: bool) -> None:
    """`Tensor.new` copies data to the device of its tensor."""

    def step() -> None:
        value = gpu(3)
        assert value.new([1.0, 2.0]).is_cuda
        assert value.new(2, 3).is_cuda

    assert {"new": 1} == ops(finished(step, fake=fake))


@both
def test_long_modes(fake: bool) -> None:
    """`mode` sorts rows of more than 2048 elements with a synchronizing algorithm."""

    def step() -> None:
        gpu(2, 2048).mode()
        gpu(2, 2049).mode()

    assert {"mode": 1} == ops(finished(step, fake=fake))


# ---------------------------------------------------------------------------------------------- without data


GUARDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: torch.isnan(x).sum().item(),
    "int": lambda x: torch.isnan(x).int().sum().item(),
    "count": lambda x: torch.count_nonzero(torch.isnan(x)).item(),
    "mean": lambda x: torch.isnan(x).float().mean().item(),
    "max": lambda x: bool(x.isnan().max()),
    "any": lambda x: bool(x.isinf().any()),
    "stack": lambda x: any(torch.stack([torch.isnan(x).any(), torch.isinf(x).any()]).tolist()),
    "or": lambda x: bool((torch.isnan(x) | torch.isinf(x)).any()),
    "logical_or": lambda x: bool(torch.logical_or(x.isnan(), x.isinf()).any()),
    "not": lambda x: not (~x.isnan()).all(),
    "finite": lambda x: not torch.isfinite(x).all(),
    "missing": lambda x: x.numel() - torch.isfinite(x).sum().item(),
    "itself": lambda x: bool((x != x).any()),
}


@pytest.mark.parametrize("name", GUARDS)
def test_checks_find_nothing(name: str) -> None:
    """Checks for NaN and infinity find none without data; they synchronize all the same."""

    def step() -> None:
        if GUARDS[name](gpu(3, 4)):
            raise ValueError("the loss is no number")

    assert 1 == sum(ops(finished(step, fake=True)).values())


def test_clipping_without_data() -> None:
    """The norm of gradients without data is finite."""

    def step() -> None:
        model = nn.Linear(3, 3, device="cuda")
        for _ in range(5):
            model(gpu(1, 3)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    assert 5 == sum(ops(finished(step, fake=True)).values())


def test_the_scale_without_data() -> None:
    """A GradScaler finds no infinity without data, and keeps its scale."""

    def step() -> None:
        weight = nn.Parameter(gpu(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert 4.0 == scaler.get_scale()

    finished(step, fake=True)
