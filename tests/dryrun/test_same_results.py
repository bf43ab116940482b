"""A dry run computes what the program computes, with and without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import instrument
from instrument.syncs.dryrun.run import dry_run
from tests.support.memory import peak_kib

from .reports import gpu, listed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
number = st.integers(0, 50)


# ------------------------------------------------------------------------------------------ the same results


class Block(nn.Module):
    """One of everything that models contain."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, device=device)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, device=device)
        self.norm = nn.LayerNorm(8, device=device)
        self.out = nn.Linear(8, 11, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.attend(hidden, hidden, hidden, need_weights=False)[0]
        return self.out(F.dropout(F.gelu(self.norm(hidden)), 0.2))


def trained(device: str) -> list[torch.Tensor]:
    """Return the losses, gradients and parameters of three steps."""
    torch.manual_seed(3)
    model = Block(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = []
    for _ in range(3):
        tokens = torch.randint(11, (2, 5), device=device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        results += [loss.detach(), *(each.grad.clone() for each in model.parameters())]
        optimizer.step()
    return results + [each.detach() for each in model.parameters()]


def test_the_same_results() -> None:
    """The step computes bit for bit what it does on the CPU."""
    results: list[torch.Tensor] = []
    report = dry_run(lambda: results.extend(trained("cuda")))
    assert (None, []) == (report.error, report.findings)
    for expected, actual in zip(trained("cpu"), results, strict=True):
        assert torch.equal(expected, actual)


# ---------------------------------------------------------------------------------------------- without data


def logged() -> None:
    """Train with mixed precision, a scaler, clipping and logging."""
    model = Block("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(3):
        tokens = torch.randint(11, (2, 5)).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if loss.isnan().any():
            raise ValueError("the loss is no number")
        text = f"{step}: {loss.item():.3f}, {norm:.2f}"
        assert text.startswith(str(step))


def test_without_data_the_same_is_found() -> None:
    """Without data the same synchronizations are found, as often, at the same lines."""
    real, fake = dry_run(logged), dry_run(logged, fake=True)
    expected = [
        ("to", 3, 'tokens = torch.randint(11, (2, 5)).to("cuda")'),
        ("item", 3, "scaler.step(optimizer)"),
        ("bool", 3, "if loss.isnan().any():"),
        ("format", 3, 'text = f"{step}: {loss.item():.3f}, {norm:.2f}"'),
        ("item", 3, 'text = f"{step}: {loss.item():.3f}, {norm:.2f}"'),
    ]
    for report in (real, fake):
        assert (None, []) == (report.error, report.not_covered)
        assert 3 == report.steps
        assert expected == listed(report)
    assert [found.bytes for found in real.findings] == [found.bytes for found in fake.findings]
    assert len(fake.coverage) == len(real.coverage) + 1


def test_without_data_memory_stays_small() -> None:
    """A layer of 400 GB runs forward and backward."""
    peak = peak_kib()

    def step() -> None:
        model = nn.Linear(320_000, 320_000, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 320_000, device="cuda")).sum().backward()
        optimizer.step()
        assert model.weight.grad.shape == (320_000, 320_000)
        model.weight.sum().item()

    report = dry_run(step, fake=True)
    assert report.error is None
    assert [("item", 1, "model.weight.sum().item()")] == listed(report)
    assert peak_kib() - peak < 300_000


def test_without_data_earlier_module() -> None:
    """A module that existed before the run is used as it is."""
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()

    def step() -> None:
        model(torch.ones(3, 4, device="cuda")).sum().backward()
        model.weight.sum().item()

    report = dry_run(step, fake=True, on_gpu=[model])
    assert (None, ["item"]) == (report.error, [op for op, _, _ in listed(report)])
    assert torch.equal(before, model.weight)


# ------------------------------------------------------------------------------------------- random programs


HOST, PINNED, GPU = "host", "pinned", "gpu"


class Machine:
    """A model of where tensors are and how often the CPU waits, from the documentation of CUDA and torch alone."""

    def __init__(self) -> None:
        self.held = [
            (torch.ones(4), HOST), (torch.ones(4).pin_memory(), PINNED), (torch.ones(4, device="cpu"), HOST),
            (torch.full((4,), 2.0, device="cuda"), GPU),
        ]  # fmt: skip
        self.waits: list[str] = []

    def tensor(self, which: int) -> tuple[torch.Tensor, str]:
        return self.held[which % len(self.held)]

    def keep(self, value: torch.Tensor, where: str) -> None:
        self.held.append((value, where))

    def read(self, how: str, which: int) -> None:
        """A read synchronizes if the tensor is on the GPU."""
        value, where = self.tensor(which)
        READS[how](value)
        self.waits += [how] * (where == GPU)

    def combine(self, how: str, which: int) -> None:
        """A result is on its operand's device, and never pinned."""
        value, where = self.tensor(which)
        self.keep(CLEAN[how](value), GPU if where == GPU else HOST)

    def view(self, how: str, which: int) -> None:
        """A view is on its base's device."""
        value, where = self.tensor(which)
        self.keep(VIEWS[how](value), where)

    def up(self, non_blocking: bool, which: int) -> None:
        """A copy to the GPU synchronizes if it is blocking: 64 KiB are copied at once, pinned or not."""
        value, where = self.tensor(which)
        self.keep(value.to("cuda", non_blocking=non_blocking), GPU)
        self.waits += ["to"] * (where != GPU and not non_blocking)

    def down(self, non_blocking: bool, which: int) -> None:
        """A copy to the host synchronizes unless it is non-blocking: torch then pins the copy."""
        value, where = self.tensor(which)
        out = value.to("cpu", non_blocking=non_blocking)
        self.keep(out, where if where != GPU else PINNED if non_blocking else HOST)
        self.waits += ["to"] * (where == GPU and not non_blocking)

    def copy(self, non_blocking: bool, target: int, source: int) -> None:
        """A copy to the GPU, or to pinned memory, does not synchronize if it is non-blocking."""
        (to, there), (fro, here) = self.tensor(target), self.tensor(source)
        to.copy_(fro, non_blocking=non_blocking)
        crosses = (there == GPU) != (here == GPU)
        self.waits += ["copy_"] * (crosses and not (non_blocking and HOST != there))

    def pin(self, which: int) -> None:
        """Pinning does not synchronize."""
        value, where = self.tensor(which)
        if where != GPU:
            self.keep(value.pin_memory(), PINNED)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda value: value.sum().item(),
    "bool": lambda value: bool((value > 0).all()),
    "tolist": lambda value: value.tolist(),
    "nonzero": lambda value: value.nonzero(),
    "getitem": lambda value: value[value > 0],
    "unique": lambda value: value.unique(),
    "equal": lambda value: torch.equal(value, value.clone()),
    "print": lambda value: str(value),
    "float": lambda value: float(value.mean()),
}


CLEAN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda value: value + 1,
    "clone": lambda value: value.clone(),
    "cat": lambda value: torch.cat([value, value])[:4],
    "zeros": lambda value: torch.zeros_like(value),
    "where": lambda value: torch.where(value > 0, value, -value),
    "masked": lambda value: value.masked_fill(value > 1, 0.0),
    "sorted": lambda value: value.sort().values,
    "softmax": lambda value: value.softmax(0),
    "half": lambda value: value.half().float(),
}


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda value: value.detach(),
    "view": lambda value: value.view(2, 2).view(4),
    "self": lambda value: value[:],
    "data": lambda value: value.data,
}


command = st.one_of(
    st.tuples(st.just("read"), st.sampled_from(sorted(READS)), number),
    st.tuples(st.just("combine"), st.sampled_from(sorted(CLEAN)), number),
    st.tuples(st.just("view"), st.sampled_from(sorted(VIEWS)), number),
    st.tuples(st.sampled_from(["up", "down"]), st.booleans(), number),
    st.tuples(st.just("copy"), st.booleans(), number, number),
    st.tuples(st.just("pin"), number),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(command, max_size=25), st.booleans())
def test_random_programs(program: list[tuple[Any, ...]], fake: bool) -> None:
    """For any program, exactly the synchronizing calls are found, and tensors report their device."""
    expected: list[str] = []

    def step() -> None:
        machine = Machine()
        for name, *arguments in program:
            getattr(machine, name)(*arguments)
        for value, where in machine.held:
            assert (value.is_cuda, value.is_pinned()) == (where == GPU, where == PINNED)
        expected.extend(machine.waits)

    report = dry_run(step, fake=fake)
    if report.error is not None:
        raise report.error
    found = {each.op: 0 for each in report.syncs}
    for each in report.syncs:
        found[each.op] += each.count
    assert {op: expected.count(op) for op in expected} == found


@pytest.mark.parametrize(
    ("budget", "exceeded"),
    [
        ({"train/forward": 2}, None),
        ({"train": 2}, None),
        ({"backward": 0}, 'region "backward" has a budget, but never ran; there were "forward", "train"'),
        ({"forward": 1}, 'region "forward" synchronizes 2 times in 1 of 3 steps; its budget is 1'),
        (2, None),
        (1, "a step synchronizes 2 times in 1 of 3 steps; its budget is 1"),
    ],
)
def test_a_budget(budget: int | dict[str, int], exceeded: str | None) -> None:
    """Each step's synchronizations count toward a region's budget afresh, and `assert_max` checks them all."""

    def train() -> None:
        model = nn.Linear(4, 2, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with instrument.annotate("train"), instrument.annotate("forward"):
                loss = model(gpu(3, 4)).sum()
                for _ in range(2 if step == 1 else 1):
                    loss.item()
            loss.backward()
            optimizer.step()

    report = dry_run(train, budget=budget)
    assert exceeded is None or str(report.over()).startswith(exceeded)
    assert (exceeded is None) == (report.over() is None)
    assert report.over(1) is not None
