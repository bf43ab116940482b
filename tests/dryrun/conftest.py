"""Fixtures of the tests of dry runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _device
from torch.utils.checkpoint import DefaultDeviceType

from instrument.base.compat import operators
from instrument.record.regions import dispatch
from instrument.syncs.dryrun.cuda import PretendedCuda

from .pretended import Noted

PLACES: list[Any] = [
    torch, torch._C, torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator, torch.Tensor,
    torch.nn.functional, torch.nn.init, torch.autograd, torch.autograd.graph.saved_tensors_hooks,
    torch.serialization, torch.optim.Optimizer, torch.nn.Module, torch.UntypedStorage, torch.backends.cudnn.m,
    torch.version, threading.Thread, torch._dynamo.eval_frame, torch._subclasses.fake_tensor.FakeTensor,
    torch.distributions.constraints, torch.distributions.constraints._Interval, torch.profiler,
    torch.autocast, sys.modules["torch.autograd.profiler"],
]  # fmt: skip


OPTIMIZERS: Any = sys.modules["torch.optim.optimizer"]  # the package keeps the name to itself


LAZY = {"__warningregistry__", "__annotations__", "__annotate__"}


def contents() -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(place).items() if name not in LAZY} for place in PLACES]


@pytest.fixture
def unchanged() -> Iterator[None]:
    """Check that a dry run restores everything that it replaces."""
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()  # torch looks for some of its modules in its first step
    before = contents()
    hooks = dict(OPTIMIZERS._global_optimizer_post_hooks)
    generator, device = torch.random.get_rng_state(), _device.CURRENT_DEVICE
    yield
    for place, old, new in zip(PLACES, before, contents(), strict=True):
        assert [] == [name for name in old if name not in new or old[name] is not new[name]], place
        assert set() == {name for name in new.keys() - old.keys() if not isinstance(new[name], ModuleType)}, place
    assert hooks == OPTIMIZERS._global_optimizer_post_hooks
    assert generator.shape == torch.random.get_rng_state().shape
    assert device == _device.CURRENT_DEVICE
    assert not torch.cuda.is_available()
    assert not torch.cuda.is_initialized()
    assert [] == [*operators.function_modes()]
    assert 0 == torch._C._len_torch_dispatch_stack()
    assert not dispatch.recording
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA driver"):
        torch.ones(2, device="cuda")


@pytest.fixture(autouse=True)
def defaults_of_torch() -> None:
    """Restore what other tests changed in torch, and drop the threads they left behind."""
    torch.distributions.Distribution.set_default_validate_args(True)  # torch's default until something is compiled
    DefaultDeviceType.set_device_type("cuda")  # DeepSpeed sets the CPU
    for thread in threading.enumerate():
        if isinstance(thread, threading._DummyThread):  # of C++, which Python lists for ever
            threading._active.pop(thread.ident, None)  # type: ignore[attr-defined]


@pytest.fixture
def noted() -> Iterator[Noted]:
    """Pretend that there is a GPU, and return its notes."""
    notes = Noted()
    gpu = PretendedCuda(notes)
    gpu.install()
    yield notes
    gpu.undo()
