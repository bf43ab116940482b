"""Every signature that moves or creates tensors, modules and storages, with each form of device."""

from __future__ import annotations

import io
import warnings
from itertools import product
from typing import Any

import numpy as np  # noqa: F401 - for the calls
import pytest
import torch
from torch import nn

from instrument import dry_run
from instrument.syncs.transfer import parse_to

DEVICES = (
    '"cuda"', '"cuda:0"', "0", 'torch.device("cuda")', 'torch.device("cuda", 0)', "torch.device(0)",
    'torch.device(type="cuda", index=0)',
)  # fmt: skip
TO = (
    "{d}", "device={d}", "{d}, torch.float64", "{d}, dtype=torch.float64", "device={d}, dtype=torch.float64",
    "dtype=torch.float64, device={d}", "{d}, None, True", "{d}, non_blocking=True",
    "device={d}, non_blocking=True", "{d}, torch.float64, True",
    "dtype=torch.float64, non_blocking=True, device={d}", "{d}, memory_format=torch.preserve_format",
    "other", "tensor=other", "other, True", "other, non_blocking=True",
)  # fmt: skip
COPYING = (
    "{d}, torch.float64, False, True", "{d}, copy=True", "device={d}, copy=True", "other, False, True",
    "tensor=other, copy=True",
)  # fmt: skip
CUDA = ("", "{d}", "device={d}", "{d}, True", "{d}, non_blocking=True", "device={d}, non_blocking=True", "None")
STORAGE_CUDA = ("", "0", "device=0", "None, True", "0, non_blocking=True")  # torch accepts numbers only
MOVES = (
    *(f"x().to({each})" for each in TO + COPYING),
    *(f"module().to({each}).weight" for each in TO),
    *(f"packed().to({each}).data" for each in TO),
    *(f"x().cuda({each})" for each in CUDA),
    *(f"module().cuda({each}).weight" for each in CUDA[:3]),
    *(f"packed().cuda({each}).data" for each in ("", "{d}", "device={d}", "{d}, non_blocking=True")),
    *(f"x().{kind}().cuda({each})" for kind in ("untyped_storage", "storage") for each in STORAGE_CUDA),
    *(f"x().{kind}().to(device={{d}})" for kind in ("untyped_storage", "storage")),
    "x().untyped_storage().to(device={d}, non_blocking=True)", "x().type(torch.cuda.FloatTensor)",
    'x().type("torch.cuda.FloatTensor")', "x().type(dtype=torch.cuda.FloatTensor)", "x().type_as(other)",
    "x().type_as(other=other)", "module().type(torch.cuda.FloatTensor).weight",
    "module().to_empty(device={d}).weight",
    "module()._apply(lambda each: each.to(device={d})).weight", "torch.empty({d2}).copy_(x(), True)",
    "x().pin_memory().to({d}, non_blocking=True)", "packed().pin_memory().to(device={d}).data",
    "torch.utils.dlpack.from_dlpack(x().to({d}))", "torch.from_numpy(np.ones(2)).to(device={d})",
)  # fmt: skip
LOADS = (
    "map_location={d3}", "{d3}", 'map_location={{"cpu": "cuda:0"}}', "map_location=lambda data, _: data.cuda()",
    "map_location=lambda data, _: data.cuda(0)", "weights_only=False, map_location={d3}",
)  # fmt: skip
MODULES = (
    "nn.Linear(4, 2, device={d})", "nn.Linear(4, 2, True, {d})", "nn.Conv2d(1, 1, 1, device={d})",
    "nn.Embedding(3, 4, device={d})", "nn.LayerNorm(4, device={d})", "nn.BatchNorm1d(4, device={d})",
    "nn.utils.skip_init(nn.Linear, 4, 2, device={d})",
    "nn.Embedding.from_pretrained(torch.ones(2, 2, device={d}))",
)  # fmt: skip
FACTORIES = (
    "zeros(2", "zeros((2,)", "ones(2", "empty(2", "full((2,), 1.0", "tensor([1.0]", "as_tensor([1.0]",
    "as_tensor(data=[1.0]", "asarray([1.0]", "as_tensor(x()", "asarray(x()", "as_tensor(np.ones(2)", "arange(3",
    "arange(0, 3, 1", "range(0, 2", "linspace(0, 1, 3", "logspace(0, 1, 3", "eye(2", "rand(2", "randn(2",
    "randint(3, (2,)", "randint(0, 3, (2,)", "randperm(3", "normal(0.0, 1.0, (2,)", "empty_strided((2,), (1,)",
    "empty_permuted((2, 2), (0, 1)", "tril_indices(2, 2", "triu_indices(2, 2, 0", "scalar_tensor(1.0",
    "hann_window(4", "hamming_window(4", "kaiser_window(4", "bartlett_window(4", "blackman_window(4",
    "fft.fftfreq(4",
    "fft.rfftfreq(4", "signal.windows.hann(4", "zeros_like(x()", "ones_like(x()", "empty_like(x()",
    "full_like(x(), 1.0", "rand_like(x()", "randn_like(x()", "randint_like(x(), 3",
)  # fmt: skip
NEW = (
    "zeros(2",
    "zeros((2,)",
    "ones((2,)",
    "empty((2,)",
    "full((2,), 1.0",
    "tensor([1.0]",
    "empty_strided((2,), (1,)",
)
NOT_FAKE = (  # torch cannot make these without data
    "torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,), device={d})",
    "torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1.0]), (1, 2), device={d})",
    "torch.nested.nested_tensor([x()], device={d})",
)
CREATIONS = (
    *(f"torch.{each}, device={{d}})" for each in FACTORIES),
    *(f"torch.{each}, dtype=torch.int64, device={{d}})" for each in ("zeros(2", "arange(3", "zeros_like(x()")),
    *(f"torch.{each}, device={{d}}, requires_grad=True)" for each in ("zeros(2", "randn_like(x()")),
    *(f"x().new_{each}, device={{d}})" for each in NEW),
    *(f"other.new_{each})" for each in NEW),
    *(f"next({each}.parameters())" for each in MODULES),
    "nn.LSTM(3, 4, device={d}).weight_ih_l0", "nn.MultiheadAttention(4, 1, device={d}).in_proj_weight",
    "nn.BatchNorm1d(4, device={d}).running_mean", "nn.Parameter(torch.ones(2, device={d}))",
    "nn.TransformerEncoderLayer(4, 1, 8, device={d}).linear1.weight", "torch.zeros_like(other)",
    "torch.rand_like(other)",
    "torch.UntypedStorage(4, device={d})", "torch.TypedStorage(4, device={d}, dtype=torch.float)",
    "torch.cuda.FloatTensor(2)", "torch.cuda.FloatTensor([1.0])", "torch.Generator({d})",
    "torch.Generator(device={d})", "torch.randn(2, generator=torch.Generator({d}), device={d})",
    "by_default({d})", "on_device({d})", "autocast(torch.ones(2, 2, device={d}))", "on_current_device({d})",
    "torch.distributions.Normal(torch.zeros(1, device={d}), 1.0).sample()",
    *(f'torch.load(saved(), {each})["x"]' for each in LOADS),
)  # fmt: skip
ACCEPTED = (
    "torch.cuda.set_device(0)", "torch.cuda.get_device_properties({d})", "torch.cuda.synchronize({d})",
    "torch.cuda.memory_allocated(device={d})", "torch.cuda.Stream({d})", "torch.cuda.Stream(device={d})",
    "torch.cuda.current_stream(device={d})", "torch.cuda.get_device_name({d})", "torch.amp.GradScaler('cuda')",
    "torch.amp.GradScaler(device='cuda')", "torch.get_device_module('cuda')", "torch.set_default_device(None)",
)  # fmt: skip


def x() -> torch.Tensor:
    return torch.ones(2)


def module() -> nn.Module:
    return nn.Linear(4, 2)


def packed() -> Any:
    return nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])


def saved() -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"x": x()}, file)
    file.seek(0)
    return file


def by_default(device: Any) -> torch.Tensor:
    torch.set_default_device(device)
    try:
        return torch.zeros(2)
    finally:
        torch.set_default_device(None)


def on_device(device: Any) -> torch.Tensor:
    with torch.device(device):
        return nn.Linear(4, 2).weight


def autocast(value: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device_type=value.device.type, dtype=torch.bfloat16):
        return value @ value


def on_current_device(device: Any) -> torch.Tensor:
    with torch.cuda.device(device):
        return torch.zeros(2, device="cuda")


def call_of(template: str, device: str) -> str:
    """Return the call with ``device`` in it, as `torch.device` where torch does not accept a number."""
    named = f"torch.device({device})" if device == "0" else device
    return template.format(d=device, d2=f"2, device={device}", d3=named)


def misplaced(templates: tuple[str, ...], *, fake: bool) -> list[str]:
    """Return the calls that raise, or whose result is not on the GPU."""
    found = []

    def evaluate() -> None:
        names = globals() | {"other": torch.ones(2, device="cuda", dtype=torch.float64)}
        for template, device in product(templates, DEVICES):
            if "{" not in template and device != DEVICES[0]:
                continue
            call = call_of(template, device)
            try:
                made = eval(call, names)
            except Exception as error:
                found.append(f"{call}: {error!r}")
                continue
            if template not in ACCEPTED and made.device != torch.device("cuda", 0):
                found.append(f"{call}: {made.device}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = dry_run(evaluate, fake=fake)
    assert report.error is None
    return found


@pytest.mark.parametrize("fake", [False, True])
def test_results_are_on_the_gpu(fake: bool) -> None:
    """Tensors moved to or created on the GPU are on the GPU."""
    assert not misplaced(MOVES + CREATIONS + ACCEPTED + (() if fake else NOT_FAKE), fake=fake)


@pytest.mark.parametrize(
    "template",
    [
        each
        for each in MOVES + CREATIONS + NOT_FAKE
        if "{d" in each and not any(word in each for word in ("cuda", "current", "pin_memory"))
    ],
)
def test_torch_accepts_the_calls(template: str) -> None:
    """PyTorch itself accepts each of these calls on the CPU."""
    names = globals() | {"other": torch.ones(2, dtype=torch.float64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eval(call_of(template, '"cpu"'), names)


@pytest.mark.parametrize(
    "text", [*TO, *COPYING, "", "None", "torch.float64", "torch.float64, True, True", "float"]
)
def test_arguments_of_to(text: str) -> None:
    """`parse_to` reads the device, dtype and copy arguments of `Tensor.to` as torch does."""
    call = text.format(d='"meta"').replace("other", "like")

    def given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    like = torch.ones(2, device="meta", dtype=torch.float64)
    args, kwargs = eval(f"given({call})", {"given": given, "torch": torch, "like": like})
    transfer = parse_to(args, kwargs)
    source = x()
    assert source.to(*args, **kwargs).device == (transfer.device or source.device)
    assert source.to(*args, **kwargs).dtype == (transfer.dtype or source.dtype)
    there = torch.ones(2, device=transfer.device, dtype=transfer.dtype)
    assert (there.to(*args, **kwargs) is not there) == transfer.copy
    assert ("True" in text and "copy=True" not in text and "False" not in text) == transfer.non_blocking
    assert not transfer.copy or "True" in text


@pytest.mark.parametrize("text", ['"cpu", True', "1, 2, 3, 4, 5", "other=like", "device=1.5, non_blocking=True"])
def test_refused_arguments_of_to(text: str) -> None:
    """Arguments that torch refuses raise torch's own error, in a dry run too."""
    errors = []

    def refused() -> None:
        like = torch.ones(2)
        try:
            eval(f"torch.ones(2).to({text})", {"torch": torch, "like": like})
        except (TypeError, RuntimeError) as error:
            errors.append(str(error).partition("\n")[0])

    refused()
    dry_run(refused)
    assert 2 == len(errors)
    assert errors[0] == errors[1]
