"""Dry runs of sparse tensors, sequences, copies, files and single operators."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from .reports import gpu, listed, only, ran, waits

pytestmark = [pytest.mark.corpus, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")]


def matrix() -> torch.Tensor:
    return torch.eye(3, device="cuda") * 2


# ---------------------------------------------------------------------------------------------------- sparse


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_coo() -> None:
    """Sparse tensors with a known size synchronize where indices are counted or merged."""

    def step() -> None:
        indices = torch.zeros(2, 3, dtype=torch.long, device="cuda")
        made = torch.sparse_coo_tensor(indices, gpu(3), (4, 4))
        assert made.is_cuda
        made.to_dense().sum()
        merged = made.coalesce()
        merged.values().mul(2)
        torch.sparse_coo_tensor(indices, gpu(3))
        gpu(2, 2).to_sparse()

    expected = [
        ("coalesce", 1, "merged = made.coalesce()"),
        ("sparse_coo_tensor", 1, "torch.sparse_coo_tensor(indices, gpu(3))"),
        ("to_sparse", 1, "gpu(2, 2).to_sparse()"),
    ]
    assert expected == waits(step)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_csr() -> None:
    """Products with CSR tensors do not synchronize; converting a dense tensor counts its values, which does."""

    def step() -> None:
        rows = torch.arange(4, device="cuda")
        made = torch.sparse_csr_tensor(rows, rows[:3], gpu(3), size=(3, 3))
        assert made.is_cuda
        assert (made @ gpu(3, 2)).is_cuda
        gpu(2, 2).to_sparse_csr()

    report = ran(step)
    assert ["gpu(2, 2).to_sparse_csr()"] == [found.site.code for found in report.syncs]
    assert (1, "to_sparse_csr") == (only(report).count, only(report).op)


# ------------------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("ordered", [True, False])
def test_packed_sequences(ordered: bool) -> None:
    """Packing sorted sequences does not synchronize; otherwise the order is copied to the GPU and back."""

    def step() -> None:
        model = nn.LSTM(3, 5, batch_first=True, device="cuda")
        lengths = [4, 2] if ordered else [2, 4]
        packed = pack_padded_sequence(gpu(2, 4, 3), lengths, batch_first=True, enforce_sorted=ordered)
        out, _ = model(packed)
        padded, counts = pad_packed_sequence(out, batch_first=True)
        assert padded.is_cuda
        assert counts.is_cpu
        padded.sum().backward()

    expected = [
        (
            "to",
            1,
            "packed = pack_padded_sequence(gpu(2, 4, 3), lengths, batch_first=True, enforce_sorted=ordered)",
        ),
        ("cpu", 1, "padded, counts = pad_packed_sequence(out, batch_first=True)"),
    ]
    assert ([] if ordered else expected) == waits(step)


def test_padded_sequences() -> None:
    """Padding knows the lengths, and does not synchronize."""
    assert [] == waits(lambda: pad_sequence([gpu(3, 2), gpu(1, 2)], batch_first=True))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind: Any) -> None:
    """Recurrent modules do not synchronize, in the forward or the backward pass."""
    assert [] == waits(lambda: kind(3, 4, num_layers=2, device="cuda")(gpu(5, 2, 3))[0].sum().backward())


# ------------------------------------------------------------------------------------------ copies and files


def test_save_and_load() -> None:
    """Saving copies each storage to the host; loading copies it to the requested device."""

    def step() -> None:
        model = nn.Linear(4, 2, device="cuda")
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        held = torch.load(file)
        assert held["weight"].device == torch.device("cuda", 0)
        file.seek(0)
        host = torch.load(file, map_location="cpu")
        assert host["weight"].is_cpu
        host["weight"].sum().item()
        file.seek(0)
        there = torch.load(file, map_location=torch.device("cuda"))
        assert there["bias"].is_cuda
        model.load_state_dict(there)
        model.load_state_dict(host)

    report = ran(step)
    expected = [
        ("save", 2, "torch.save(model.state_dict(), file)"),
        ("load", 2, "held = torch.load(file)"),
        ("load", 2, 'there = torch.load(file, map_location=torch.device("cuda"))'),
        ("copy_", 2, "model.load_state_dict(host)"),
    ]
    assert expected == listed(report)
    by_op = {found.op: found for found in report.syncs}
    assert ("D2H", "H2D") == (by_op["save"].direction, by_op["load"].direction)
    assert 4 * (8 + 2) == by_op["save"].bytes


def test_pickle() -> None:
    """Pickling copies to the host, and unpickling copies back to the GPU."""

    def step() -> None:
        text = pickle.dumps(gpu(4))
        assert pickle.loads(text).is_cuda

    report = ran(step)
    assert ["text = pickle.dumps(gpu(4))", "assert pickle.loads(text).is_cuda"] == [
        found.site.code for found in sorted(report.syncs, key=lambda found: found.site.line)
    ]
    assert [1, 1] == [found.count for found in report.syncs]


def test_copies_within_the_gpu() -> None:
    """Tensors, modules and optimizers on the GPU are copied on the GPU."""

    def step() -> None:
        model = nn.Linear(4, 2, device="cuda")
        model(gpu(3, 4)).sum().backward()
        twin = copy.deepcopy(model)
        assert twin.weight.is_cuda
        assert copy.copy(model.weight).is_cuda
        assert copy.deepcopy({"a": [gpu(2)]})["a"][0].is_cuda
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        copy.deepcopy(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        gpu(2).to("cuda"), gpu(2).cuda(0), gpu(2).clone(), gpu(2).half()

    assert [] == waits(step)


def test_modules_move() -> None:
    """Moving a module copies each of its tensors; changing its dtype does not move it."""

    def step() -> None:
        model = nn.BatchNorm1d(4)
        model.to("cuda")
        assert next(model.parameters()).is_cuda
        model.half().bfloat16().float().to(torch.float64)
        states = {name: value.cpu() for name, value in model.state_dict().items()}
        model.load_state_dict(states)
        model.cpu()
        model.weight.sum().item()

    expected = [
        ("to", 5, 'model.to("cuda")'),
        ("cpu", 5, "states = {name: value.cpu() for name, value in model.state_dict().items()}"),
        ("copy_", 5, "model.load_state_dict(states)"),
        ("cpu", 5, "model.cpu()"),
    ]
    assert expected == waits(step)


# ------------------------------------------------------------------------------------------------- operators


def test_making_tensors() -> None:
    """Tensors made from Python numbers are copied to the GPU; filled tensors are not."""

    def step() -> None:
        value = gpu(3)
        value.new_tensor([1.0, 2.0])
        torch.tensor([1.0], device="cuda")
        torch.as_tensor([1.0], device="cuda")
        (
            value.new_zeros(2),
            value.new_full((2,), 3.0),
            torch.zeros_like(value),
            torch.full((2,), 1.0, device="cuda"),
        )
        torch.arange(3, device="cuda"), torch.eye(2, device="cuda"), torch.randperm(4, device="cuda")

    expected = [
        ("new_tensor", 1, "value.new_tensor([1.0, 2.0])"),
        ("tensor", 1, 'torch.tensor([1.0], device="cuda")'),
        ("as_tensor", 1, 'torch.as_tensor([1.0], device="cuda")'),
    ]
    report = ran(step)
    assert expected == listed(report)
    assert {"H2D"} == {found.direction for found in report.syncs}


def test_one_hot() -> None:
    """Without a number of classes, one_hot reads the largest class."""

    def step() -> None:
        classes = torch.arange(3, device="cuda")
        F.one_hot(classes, num_classes=3)
        F.one_hot(classes, 3)
        F.one_hot(classes)

    report = ran(step)
    assert ["F.one_hot(classes)"] == [found.site.code for found in report.syncs]
    assert ("one_hot", 1) == (only(report).op, only(report).count)


LINALG: list[tuple[str, Callable[[], Any], bool]] = [
    ("svd", lambda: torch.linalg.svd(matrix()), True),
    ("svdvals", lambda: torch.linalg.svdvals(matrix()), True),
    ("eigh", lambda: torch.linalg.eigh(matrix()), True),
    ("eigvalsh", lambda: torch.linalg.eigvalsh(matrix()), True),
    ("inv", lambda: torch.linalg.inv(matrix()), True),
    ("inverse", lambda: matrix().inverse(), True),
    ("cholesky", lambda: torch.linalg.cholesky(matrix()), True),
    ("solve", lambda: torch.linalg.solve(matrix(), gpu(3)), True),
    ("lstsq", lambda: torch.linalg.lstsq(matrix(), gpu(3, 1)), True),
    ("pinv", lambda: torch.linalg.pinv(matrix()), True),
    ("matrix_rank", lambda: torch.linalg.matrix_rank(matrix()), True),
    ("eig", lambda: torch.linalg.eig(matrix()), True),
    ("lu_factor", lambda: torch.linalg.lu_factor(matrix()), True),
    ("det", lambda: torch.linalg.det(matrix()), False),
    ("slogdet", lambda: torch.linalg.slogdet(matrix()), False),
    ("qr", lambda: torch.linalg.qr(matrix()), False),
    ("inv_ex", lambda: torch.linalg.inv_ex(matrix()), False),
    ("cholesky_ex", lambda: torch.linalg.cholesky_ex(matrix()), False),
    ("solve_triangular", lambda: torch.linalg.solve_triangular(matrix(), matrix(), upper=True), False),
    ("norm", lambda: torch.linalg.norm(matrix()), False),
    ("multi_dot", lambda: torch.linalg.multi_dot([matrix(), matrix(), matrix()]), False),
]


@pytest.mark.parametrize(("name", "call", "waiting"), LINALG, ids=[name for name, _, _ in LINALG])
def test_linalg(name: str, call: Callable[[], Any], waiting: bool) -> None:
    """Factorizations read an error code once; determinants, QR and the `_ex` variants do not."""
    found = waits(call)
    assert [1] * waiting == [count for _, count, _ in found]
    if found:
        assert name == found[0][0].removeprefix("linalg_")


@pytest.mark.parametrize("name", ["svd", "eigh", "inv", "cholesky", "det", "qr"])
def test_linalg_backward(name: str) -> None:
    """The backward pass synchronizes only where it factorizes again."""

    def step() -> None:
        value = torch.diag(torch.arange(1.0, 4.0, device="cuda")).requires_grad_()
        out = getattr(torch.linalg, name)(value)
        first = out if isinstance(out, torch.Tensor) else out[-1]
        first.sum().backward()

    report = ran(step)
    assert [] == [found.site.code for found in report.syncs if found.backward is not None]


def test_distributions() -> None:
    """Validation of arguments and samples reads values; without it nothing does."""

    def step() -> None:
        mean, std = gpu(3), gpu(3).exp()
        checked = torch.distributions.Normal(mean, std, validate_args=True)
        checked.log_prob(mean)
        checked.rsample()
        free = torch.distributions.Normal(mean, std, validate_args=False)
        free.log_prob(free.rsample()).sum()
        torch.distributions.Categorical(logits=gpu(2, 3), validate_args=False).log_prob(
            torch.zeros(2, device="cuda")
        )

    expected = [
        ("bool", 2, "checked = torch.distributions.Normal(mean, std, validate_args=True)"),
        ("bool", 1, "checked.log_prob(mean)"),
    ]
    assert expected == waits(step)


def test_assert_close() -> None:
    """`assert_close` reads whether all values are close."""

    def step() -> None:
        value = gpu(3)
        torch.testing.assert_close(value, value.clone())

    assert [("bool", 1, "torch.testing.assert_close(value, value.clone())")] == waits(step)
