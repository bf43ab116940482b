"""Dry runs of autograd functions, views, in-place operations and torch.func."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from .reports import gpu, listed, ran, waits

pytestmark = [pytest.mark.corpus, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")]


# -------------------------------------------------------------------------------------------------- autograd


class Scaled(torch.autograd.Function):
    """Reads a value in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value * value.max().item()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (value,) = ctx.saved_tensors
        return gradient * value.min().item()


@pytest.mark.parametrize("how", ["method", "function", "grad"])
def test_custom_function(how: str) -> None:
    """Synchronizations in a custom function are at its lines; the one in the backward pass names its node."""

    def step() -> None:
        value = gpu(3, requires_grad=True)
        loss = Scaled.apply(value).sum()
        if how == "method":
            loss.backward()
        elif how == "function":
            torch.autograd.backward(loss)
        else:
            torch.autograd.grad(loss, value)

    report = ran(step)
    expected = [
        ("item", 1, "return value * value.max().item()"), ("item", 1, "return gradient * value.min().item()")
    ]  # fmt: skip
    assert expected == listed(report)
    forth, back = sorted(report.syncs, key=lambda found: found.site.line)
    assert (None, "ScaledBackward") == (forth.backward, back.backward)
    assert back.site.function.rpartition(".")[2] == "backward"
    assert [] == report.not_covered


def test_tensor_hooks() -> None:
    """Tensor hooks are watched, both before and after gradient accumulation."""

    def step() -> None:
        value = gpu(3, requires_grad=True)
        value.register_hook(lambda gradient: print(end=str(gradient.norm().item())[:0]))
        value.register_post_accumulate_grad_hook(lambda leaf: leaf.grad.max().item() and None)
        middle = value * 2
        middle.register_hook(lambda gradient: gradient * float(gradient.sum()))
        middle.sum().backward()

    expected = [
        ("item", 1, "value.register_hook(lambda gradient: print(end=str(gradient.norm().item())[:0]))"),
        ("item", 1, "value.register_post_accumulate_grad_hook(lambda leaf: leaf.grad.max().item() and None)"),
        ("float", 1, "middle.register_hook(lambda gradient: gradient * float(gradient.sum()))"),
    ]
    assert expected == waits(step)


def test_module_hooks() -> None:
    """Module hooks are watched in the forward and the backward pass."""

    def before(module: Any, args: Any) -> None:
        args[0].sum().item()

    def after(module: Any, args: Any, out: Any) -> None:
        out.tolist()

    def back(module: Any, inputs: Any, outputs: Any) -> None:
        bool(outputs[0].any())

    def back_before(module: Any, outputs: Any) -> None:
        outputs[0].cpu()

    def step() -> None:
        model = nn.Linear(4, 2, device="cuda")
        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)
        model.register_full_backward_hook(back)
        model.register_full_backward_pre_hook(back_before)
        model(gpu(3, 4, requires_grad=True)).sum().backward()

    expected = [
        ("item", 1, "args[0].sum().item()"), ("tolist", 1, "out.tolist()"),
        ("bool", 1, "bool(outputs[0].any())"), ("cpu", 1, "outputs[0].cpu()"),
    ]  # fmt: skip
    assert expected == waits(step)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    """Recomputation in the backward pass synchronizes again, at the same line."""

    def block(value: torch.Tensor) -> torch.Tensor:
        scale = value.max().item()
        return (value * scale).sin().exp()

    def step() -> None:
        value = gpu(3, requires_grad=True)
        out = checkpoint(block, value, use_reentrant=reentrant)
        out.sum().backward()

    assert [("item", 2, "scale = value.max().item()")] == waits(step)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_does_not_synchronize(reentrant: bool) -> None:
    """Checkpointing alone does not synchronize, with or without dropout."""

    def step() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).to("meta").to_empty(device="cuda")
        checkpoint(model, gpu(3, 4, requires_grad=True), use_reentrant=reentrant).sum().backward()

    assert [] == waits(step)


def test_saved_tensors_hooks() -> None:
    """User code in saved-tensor hooks is watched."""

    def pack(value: torch.Tensor) -> Any:
        return value.cpu()

    def unpack(value: Any) -> torch.Tensor:
        return value.to("cuda")

    def step() -> None:
        value = gpu(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = value.sin()
        out.sum().backward()

    report = ran(step)
    assert [("cpu", 1, "return value.cpu()"), ("to", 1, 'return value.to("cuda")')] == listed(report)
    assert ["D2H", "H2D"] == [f.direction for f in sorted(report.syncs, key=lambda found: found.site.line)]


@pytest.mark.parametrize("pinned", [False, True])
def test_save_on_cpu(pinned: bool) -> None:
    """`save_on_cpu` copies to the host and back, and with pinned memory does not synchronize."""

    def step() -> None:
        value = gpu(3, requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            out = value.sin()
        out.sum().backward()
        assert value.grad.is_cuda

    host = [("cpu", 1, "out = value.sin()"), ("to", 1, "out.sum().backward()")]
    queued = "non_blocking=is_pinnable" in inspect.getsource(torch.autograd.graph.save_on_cpu)
    down = [] if queued else [("copy_", 1, "out = value.sin()")]  # of earlier versions of torch
    assert (down if pinned else host) == waits(step)


def test_second_derivatives() -> None:
    """Second derivatives do not synchronize; reading one does."""

    def step() -> None:
        value = gpu(3, requires_grad=True)
        (first,) = torch.autograd.grad(value.pow(3).sum(), value, create_graph=True)
        first.sum().backward()
        value.grad.sum().item()

    assert [("item", 1, "value.grad.sum().item()")] == waits(step)


# ---------------------------------------------------------------------------------------- views and in-place


def test_views() -> None:
    """Views of a GPU tensor, contiguous or not, are on the GPU; reading one synchronizes."""

    def step() -> None:
        value = gpu(4, 6)
        for view in (
            value.t(),
            value[1:, ::2],
            value.unfold(1, 2, 1),
            value.as_strided((2, 2), (1, 2)),
            value.data,
        ):
            assert view.is_cuda
            view.contiguous().reshape(-1).add(1)
        assert value[:, 1].unsqueeze(0).expand(3, 4)[0].is_cuda
        value.t()[2, 3].item()

    assert [("item", 1, "value.t()[2, 3].item()")] == waits(step)


def test_views_of_pinned_memory() -> None:
    """A non-contiguous pinned tensor is first copied into pageable memory."""

    def step() -> None:
        pinned = torch.ones(400, 600, pin_memory=True)
        pinned.t().to("cuda", non_blocking=True)
        pinned[1:3].to("cuda", non_blocking=True)
        pinned[:, ::2].to("cuda", non_blocking=True)

    assert [("to", 1, 'pinned[:, ::2].to("cuda", non_blocking=True)')] == waits(step)


def test_in_place() -> None:
    """In-place operators leave tensors on their device."""

    def step() -> None:
        value, other = gpu(4), gpu(4)
        value.add_(1).mul_(other).clamp_(min=0).zero_()
        value[1:] += 1
        value += other
        value[1:3] = other[:2]
        torch.add(value, other, out=other)
        value.data = other
        assert value.is_cuda
        value.copy_(torch.ones(4))
        value.set_(other)
        value.resize_(8)
        value.sum().item()

    assert [("copy_", 1, "value.copy_(torch.ones(4))"), ("item", 1, "value.sum().item()")] == waits(step)


def test_cpu_tensors_stay_on_the_cpu() -> None:
    """A CPU tensor that receives values from the GPU synchronizes, and stays on the CPU."""

    def step() -> None:
        host, other, value = torch.ones(4), torch.ones(4), gpu(4)
        host.copy_(value)
        other.fill_(value.mean())
        assert host.is_cpu
        assert other.is_cpu
        host.sum().item(), other.numpy(), (host + other).tolist()

    assert [("copy_", 1, "host.copy_(value)"), ("fill_", 1, "other.fill_(value.mean())")] == waits(step)


def test_cpu_calls_do_not_synchronize() -> None:
    """The same calls on CPU tensors do not synchronize, even after calls on the GPU."""

    def step() -> None:
        value = torch.ones(4)
        gpu(4).sum()
        value.sum().item(), value[value > 0], value.tolist(), bool(value.any()), f"{value.sum():.2f}", str(value)
        value.nonzero(), value.unique(), value.numpy(), torch.equal(value, value), torch.linalg.inv(torch.eye(2))
        value.to("cpu"), value.cpu(), value.pin_memory().cpu()

    assert [] == waits(step)


# ------------------------------------------------------------------------------------------------ torch.func


def test_func() -> None:
    """torch.func transforms keep tensors on the GPU, and do not synchronize."""

    def step() -> None:
        value, model = gpu(3, 4), nn.Linear(4, 2, device="cuda")
        parameters = dict(model.named_parameters())
        outs = [
            vmap(lambda row: row.softmax(0))(value),
            grad(lambda x: x.sin().sum())(value),
            jvp(torch.sin, (value,), (value,))[1],
            functional_call(model, parameters, (value,)),
            vmap(grad(lambda x: x.pow(2).sum()))(value),
            vmap(lambda row: functional_call(model, parameters, (row,)))(value),
            torch.func.jacrev(lambda x: x.sin())(value[0]),
        ]
        assert all(out.is_cuda for out in outs)
        outs[1].sum().item()

    assert [("item", 1, "outs[1].sum().item()")] == waits(step)


def test_synchronization_inside_a_transform() -> None:
    """A value read inside a transformed function is found at its line."""

    def scaled(value: torch.Tensor) -> torch.Tensor:
        return (value * value.detach().max().item()).sum()

    assert [("item", 1, "return (value * value.detach().max().item()).sum()")] == waits(
        lambda: grad(scaled)(gpu(3))
    )
