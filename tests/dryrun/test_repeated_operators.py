"""Operators without data that run again give what torch gives, although torch does not run them again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from instrument import dry_run
from instrument.syncs.dryrun import dataless
from instrument.syncs.dryrun.dataless import DatalessMode

_aten: Any = torch.ops.aten
Arguments = tuple[Any, list[Any]]  # an operator and its arguments


def layouts(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix of 4 x 6 in a random layout."""
    return rng.choice((
        lambda: torch.empty(4, 6, dtype=dtype),
        lambda: torch.empty(6, 4, dtype=dtype).t(),
        lambda: torch.empty(9, 8, dtype=dtype)[3:7, 1:7],
        lambda: torch.empty(1, 6, dtype=dtype).expand(4, 6),
        lambda: torch.empty(4, 12, dtype=dtype)[:, ::2],
    ))()  # fmt: skip


UNARY = ("neg.default", "relu.default", "gelu.default", "exp.default", "clone.default", "empty_like.default",
         "zeros_like.default", "detach.default", "alias.default", "t.default", "sum.default", "isnan.default",
         "silu.default", "rsqrt.default")  # fmt: skip
BINARY = ("add.Tensor", "mul.Tensor", "div.Tensor", "eq.Tensor", "maximum.default", "mul_.Tensor", "add_.Tensor",
          "copy_.default", "gelu_backward.default")  # fmt: skip
SPECIAL: tuple[Callable[[Any, Any], Arguments], ...] = (
    lambda x, y: (_aten.mm.default, [x, y.t()]),
    lambda x, y: (_aten.addmm.default, [x[:, :4], x, y.t()]),
    lambda x, y: (_aten.view.default, [x.contiguous(), [2, -1]]),
    lambda x, y: (_aten._unsafe_view.default, [x.contiguous(), [2, 12]]),
    lambda x, y: (_aten.select.int, [x, 1, 2]),
    lambda x, y: (_aten.slice.Tensor, [x, 0, 1, 3]),
    lambda x, y: (_aten.expand.default, [x[:1], [4, 6]]),
    lambda x, y: (_aten.permute.default, [x, [1, 0]]),
    lambda x, y: (_aten.unsqueeze.default, [x, 1]),
    lambda x, y: (_aten.split.Tensor, [x, 2, 1]),
    lambda x, y: (_aten.unbind.int, [x]),
    lambda x, y: (_aten.cat.default, [[x, y, x], 1]),
    lambda x, y: (_aten.stack.default, [[x, y]]),
    lambda x, y: (_aten.sum.dim_IntList, [x, [1], True]),
    lambda x, y: (_aten.mean.dim, [x, [0]]),
    lambda x, y: (_aten.max.dim, [x, 1]),
    lambda x, y: (_aten.topk.default, [x, 2]),
    lambda x, y: (_aten._softmax.default, [x, 1, False]),
    lambda x, y: (_aten.native_layer_norm.default, [x, [6], y[0], y[1], 1e-5]),
    lambda x, y: (_aten.native_dropout.default, [x, 0.5, True]),
    lambda x, y: (_aten.where.self, [x > 0, x, y]),
    lambda x, y: (_aten.masked_fill.Scalar, [x, x > 0, 2.0]),
    lambda x, y: (_aten._to_copy.default, [x]),
    lambda x, y: (_aten.add.out, [x, y]),
    lambda x, y: (_aten.resize_.default, [x.clone(), [3]]),
    lambda x, y: (_aten.transpose_.default, [x.clone(), 0, 1]),
    lambda x, y: (_aten.as_strided.default, [x, [2], [1]]),
    lambda x, y: (_aten.index.Tensor, [x, [torch.ones(3, dtype=torch.int64)]]),
    lambda x, y: (_aten._foreach_mul.Scalar, [[x, y], 2.0]),
    lambda x, y: (_aten._foreach_add_.List, [[x.clone(), y.clone()], [y, x]]),
    lambda x, y: (_aten._foreach_norm.Scalar, [[x, y] * 6]),
    lambda x, y: (_aten.new_empty.default, [x, [2, 3]]),
)  # fmt: skip


def calls(seed: int) -> Iterator[Arguments]:
    """Yield calls of operators, the same ones for a seed."""
    rng = random.Random(seed)
    for _ in range(12):
        dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16))
        x = layouts(rng, dtype)
        y = x if rng.random() < 0.2 else layouts(rng, dtype)
        kind = rng.choice("ubs")
        if kind == "u":
            yield operator(rng.choice(UNARY)), [x]
        elif kind == "b":
            writable = x.clone()
            yield operator(rng.choice(BINARY)), [writable, writable if y is x else y]
        else:
            yield rng.choice(SPECIAL)(x, y)


def operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload)


def described(args: Sequence[Any], out: Any) -> list[Any]:
    """Return all that a program can see of the results of an operator, and of its arguments after it."""
    given = list(dataless.tensors(list(args)))
    made = list(dataless.tensors(out))
    storages = [tensor.untyped_storage()._cdata for tensor in (*given, *made)]
    first = [storages.index(storage) for storage in storages]
    same = [[tensor is argument for argument in given] for tensor in made]
    look = [
        (each.shape, each.stride(), each.storage_offset(), each.dtype, each.layout, each.device,
         each.requires_grad, each.is_neg(), each.untyped_storage().nbytes(), type(each))
        for each in (*given, *made)
    ]  # fmt: skip
    return [type(out), first, same, look]


def outcome(run: Callable[..., Any], func: Any, args: list[Any]) -> Any:
    kwargs = {"out": torch.empty(4, 6, dtype=args[0].dtype)} if func is _aten.add.out else {}
    try:
        return described([*args, *kwargs.values()], run(func, args, kwargs))
    except Exception as error:
        return type(error), str(error).splitlines()[0]


@pytest.mark.parametrize("seed", range(30))
def test_results(seed: int) -> None:
    """Hundreds of operators in random layouts have the results of torch, both the first and the second time."""
    with FakeTensorMode(allow_non_fake_inputs=True) as torch_itself:
        torch_itself.cache_enabled = False
        expected = [outcome(lambda func, args, kwargs: func(*args, **kwargs), *each) for each in calls(seed)]
    run = DatalessMode()
    with run.mode:
        for _ in range(3):
            assert [outcome(lambda *call: run.run(*call)[0], *each) for each in calls(seed)] == expected


def test_torch_runs_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal calls, only the first runs in torch; other shapes, strides, types and numbers are other calls."""
    ran: list[Any] = []
    dispatch = FakeTensorMode.dispatch
    monkeypatch.setattr(
        FakeTensorMode, "dispatch", lambda self, func, *rest: (ran.append(func), dispatch(self, func, *rest))[1]
    )
    run = DatalessMode()
    with run.mode:
        x, y = torch.empty(4, 6), torch.empty(6, 4)
        for func, args in (
            (_aten.add.Tensor, [x, x]), (_aten.add.Tensor, [x, x.clone()]), (_aten.add.Tensor, [x, y.t()]),
            (_aten.add.Tensor, [x, 1]), (_aten.add.Tensor, [x, 1.0]), (_aten.mm.default, [x, y]),
        ):  # fmt: skip
            ran.clear()
            for _ in range(3):
                run.run(func, args, {})
            assert ran == [func]


def test_values_are_known_as_before() -> None:
    """A value that is known of one tensor is not known of another one of the same shape."""
    run = DatalessMode()
    with run.mode:
        unknown, known = torch.empty(100, 200), torch.empty(100, 200)
        dataless.note(known, 3.0)
        for _ in range(2):
            copies = [run.run(_aten.clone.default, [each], {})[0] for each in (unknown, known)]
            assert [dataless.notes_of(each).get("value") for each in copies] == [None, 3.0]
        run.run(_aten.add_.Tensor, [known, unknown], {})
        assert "value" not in dataless.notes_of(known)


class Model(nn.Module):
    """A small transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def train() -> None:
    """Train for three steps."""
    model = Model().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    for _ in range(3):
        tokens = torch.randint(0, 50, (2, 8), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def test_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training counts the same with and without repeated results; memory too."""
    repeated = dry_run(train, fake=True)
    monkeypatch.setattr(dataless, "_OPERATORS", {})
    monkeypatch.setattr(dataless, "is_sure", lambda func: False)
    usual = dry_run(train, fake=True)
    assert str(repeated) == str(usual)
    assert repeated.counts is not None
    assert usual.counts is not None
    assert repeated.counts.as_dict() == usual.counts.as_dict()
    assert str(repeated.memory) == str(usual.memory)
