"""Devices other than the pretended GPU: a dry run answers as torch does without one."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from instrument import dry_run

from .reports import both, gpu

pytestmark = [
    pytest.mark.corpus,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # copies of tensors by torch.tensor, sparse tensors
]


def cpu() -> torch.Tensor:
    return torch.ones(2, 2, device="cpu")


def meta() -> torch.Tensor:
    return torch.empty(2, 2, device="meta")


def outcome(call: Callable[[], Any]) -> str:
    """Return the type and the value or the device of what ``call`` returns, or its error."""
    try:
        made = call()
    except Exception as error:
        return f"error {type(error).__name__}: {error}"
    if isinstance(made, torch.Tensor):
        kinds = [made.is_meta, made.is_cpu, made.is_cuda, made.is_pinned()]
        return f"{made.device} {kinds} {made.get_device()} {made.shape} {made.dtype}"
    return f"{type(made).__name__}: {made}"


def _like(name: str) -> Callable[[], Any]:
    more = {"full_like": (1,), "randint_like": (3,)}.get(name, ())
    return lambda: getattr(torch, name)(cpu(), *more, device="meta")


def _on(name: str, device: Any) -> Callable[[], Any]:
    return lambda: FACTORIES[name](device=device)


FACTORIES: dict[str, Callable[..., Any]] = {
    "empty": functools.partial(torch.empty, 2),
    "arange": functools.partial(torch.arange, 3),
    "tensor": functools.partial(torch.tensor, [1.0, 2.0]),
    "tensor of a tensor": lambda **options: torch.tensor(cpu(), **options),
    "as_tensor": functools.partial(torch.as_tensor, [1.0, 2.0]),
    "as_tensor of an array": functools.partial(torch.as_tensor, np.ones(2)),
    "as_tensor of a tensor": lambda **options: torch.as_tensor(cpu(), **options),
    "asarray": functools.partial(torch.asarray, [1.0, 2.0]),
    "new_tensor": lambda **options: cpu().new_tensor([1.0], **options),
    "new_ones": lambda **options: cpu().new_ones(2, **options),
    "Linear": lambda **options: nn.Linear(2, 2, **options).weight,
    "sparse": lambda **options: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), **options),
    "storage": lambda **options: torch.UntypedStorage(4, **options).device,
    "generator": lambda **options: torch.Generator(**options).device,
}
DEVICES: list[Any] = [
    "meta", torch.device("meta"), torch.device("meta", 0), "cpu", "cpu:0", torch.device("cpu"), "xpu", "xpu:0",
    "mps", "privateuseone", "privateuseone:0", "nonsense",
]  # fmt: skip
CALLS: dict[str, Callable[[], Any]] = {
    **{f"{name} on {device!r}": _on(name, device) for name in FACTORIES for device in DEVICES},
    **{f"to({device!r})": lambda device=device: cpu().to(device) for device in DEVICES},
    **{f"Module.to({device!r})": lambda device=device: nn.Linear(2, 2).to(device).weight for device in DEVICES},
    **{name: _like(name) for name in dir(torch) if name.endswith("_like") and name[0] != "_"},
    "to_empty meta": lambda: nn.Linear(2, 2).to_empty(device="meta").weight,
    "to_empty cpu": lambda: nn.Linear(2, 2, device="meta").to_empty(device="cpu").weight,
    "to another": lambda: cpu().to(meta()),
    "to other=": lambda: cpu().to(other=meta()),
    "from meta": lambda: meta().to("cpu"),
    "from meta to another": lambda: meta().to(cpu()),
    "cpu()": lambda: meta().cpu(),
    "memory format": lambda: (
        torch.ones(2, 3, 4, 4)
        .to("meta", memory_format=torch.channels_last)
        .is_contiguous(memory_format=torch.channels_last)
    ),
    "type": lambda: meta().type(),
    "type to the CPU": lambda: meta().type("torch.FloatTensor"),
    "type of meta": lambda: meta().type(torch.float64),
    "type_as": lambda: cpu().type_as(meta()),
    "type_as back": lambda: meta().type_as(cpu()),
    "new": lambda: meta().new([1.0]),
    "new with sizes": lambda: meta().new(2),
    "new_tensor of meta": lambda: meta().new_tensor([1.0]),
    "new_tensor of meta on the CPU": lambda: meta().new_tensor([1.0], device="cpu"),
    "as_tensor of meta": lambda: torch.as_tensor(meta()),
    "tensor of meta on the CPU": lambda: torch.tensor(meta(), device="cpu"),
    "tensor of meta numbers": lambda: torch.tensor([meta().sum()]),
    "copy_ to meta": lambda: meta().copy_(cpu()),
    "copy_ from meta": lambda: cpu().copy_(meta()),
    "item": lambda: meta().sum().item(),
    "tolist": lambda: meta().tolist(),
    "bool": lambda: bool(meta().sum()),
    "numpy": lambda: meta().numpy(),
    "print": lambda: str(meta()),
    "format": lambda: f"{meta().sum()}",
    "add": lambda: cpu() + meta(),
    "cat": lambda: torch.cat([meta(), cpu()]),
    "set item": lambda: meta().__setitem__(0, 1.0),
    "deepcopy": lambda: copy.deepcopy(meta()),
    "pin_memory": lambda: meta().pin_memory(),
    "is_pinned": lambda: meta().is_pinned(),
    "storage of meta": lambda: meta().untyped_storage().device,
    "dlpack": lambda: torch.from_dlpack(meta()),
    "default": lambda: torch.get_default_device(),
    "load": lambda: _loaded("meta"),
}  # fmt: skip


def _loaded(where: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(cpu(), file)
    file.seek(0)
    return torch.load(file, map_location=where)


@functools.cache
def outcomes_in_dry_run(fake: bool) -> dict[str, str]:
    """Return the outcome of each call in one dry run of all; none may synchronize."""
    seen: dict[str, str] = {}
    report = dry_run(lambda: seen.update((name, outcome(call)) for name, call in CALLS.items()), fake=fake)
    assert (None, []) == (report.error, report.syncs)
    return seen


@both
@pytest.mark.parametrize("name", CALLS)
def test_other_devices(name: str, fake: bool) -> None:
    """A call that names no GPU returns or raises what it does without a dry run, and does not synchronize.

    Without data, an error may have another text.
    """
    expected, seen = outcome(CALLS[name]), outcomes_in_dry_run(fake)[name]
    assert expected == seen or (fake and expected[:6] == seen[:6] == "error ")


DEFAULTS: dict[str, Callable[[], Any]] = {
    **{name: _on(name, None) for name in FACTORIES if name not in ("storage", "generator")},
    "zeros_like": lambda: torch.zeros_like(cpu()),
    "get_default_device": torch.get_default_device,
    "type": lambda: cpu().type("torch.DoubleTensor"),
    "from_numpy": lambda: torch.from_numpy(np.ones(2)),
    "load": lambda: _loaded(None),
}


@both
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("how", ["context", "default"])
def test_default_devices(how: str, device: str, fake: bool) -> None:
    """A default device that is no GPU applies to the same functions as without a dry run."""

    def outcomes() -> dict[str, str]:
        if how == "context":
            with torch.device(device):
                return {name: outcome(call) for name, call in DEFAULTS.items()}
        torch.set_default_device(device)
        try:
            return {name: outcome(call) for name, call in DEFAULTS.items()}
        finally:
            torch.set_default_device(None)

    seen: list[dict[str, str]] = []
    report = dry_run(lambda: seen.append(outcomes()), fake=fake)
    assert [outcomes()] == seen
    assert (None, []) == (report.error, report.syncs)


@both
def test_default_devices_of_threads(fake: bool) -> None:
    """A default device is of the thread that set it."""
    seen: list[str] = []

    def step() -> None:
        with torch.device("cuda"):
            assert torch.ones(2).is_cuda
            assert not cpu().new_tensor([1.0]).is_cuda
            for made in (lambda: torch.ones(2), lambda: torch.tensor([1.0])):
                thread = threading.Thread(target=lambda made=made: seen.append(made().device.type))
                thread.start()
                thread.join()

    report = dry_run(step, fake=fake)
    assert (None, ["cpu", "cpu"]) == (report.error, seen)


@both
def test_from_the_gpu_to_meta(fake: bool) -> None:
    """A GPU tensor leaves no trace on the meta device: no synchronization, and no tag on the result."""

    def step() -> None:
        value, there = gpu(2, 2), meta()
        moved = [
            value.to("meta"), value.to(there), value.type_as(there), torch.tensor(value, device="meta"),
            torch.as_tensor(value, device="meta"), value.new_tensor([1.0], device="meta"),
            torch.zeros_like(value, device="meta"), value.new_empty(2, device="meta"), there.copy_(value),
            nn.Linear(2, 2, device="cuda").to("meta").weight,
            nn.Linear(2, 2, device="cuda").to_empty(device="meta").weight,
        ]  # fmt: skip
        assert [("meta", False)] * len(moved) == [(each.device.type, each.is_cuda) for each in moved]
        with torch.device("meta"):
            assert torch.tensor(value).is_meta
        assert nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight.is_cuda
        refused = [there.cuda, lambda: there.to("cuda"), lambda: there.to(value), lambda: value.copy_(meta())]
        for call in refused:
            with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
                call()
        with pytest.raises(RuntimeError):
            value + there

    report = dry_run(step, fake=fake)
    if report.error is not None:
        raise report.error
    assert [] == report.findings
