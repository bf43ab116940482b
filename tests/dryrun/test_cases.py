"""A dry run of what training steps are made of: exactly the waits that a GPU would have, at the user's lines."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from instrument.dryrun.run import dry_run
from instrument.findings import Finding
from instrument.syncs.report import SyncReport

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
Wait = tuple[str, int, str]  # the operation, how often, the line


def ran(step: Callable[[], Any], **options: Any) -> SyncReport:
    """The report of a step that came to its end."""
    report = dry_run(step, **options)
    if report.error is not None:
        raise report.error
    return report


def waits(step: Callable[[], Any], **options: Any) -> list[Wait]:
    """The waits of a step, from the first line to the last, and nothing that was not covered."""
    report = ran(step, **options)
    assert [] == [found.cause for found in report.not_covered]
    return listed(report)


def listed(report: SyncReport) -> list[Wait]:
    found = sorted(report.syncs, key=lambda found: (found.site.line if found.site else 0, found.op))
    return [(each.op, each.count, each.site.code if each.site else "") for each in found]


def only(report: SyncReport) -> Finding:
    (found,) = report.syncs
    return found


def gpu(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **options)


def matrix() -> torch.Tensor:
    return torch.eye(3, device="cuda") * 2


# ------------------------------------------------------------------------------------------ mixed precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Autocast of the GPU is on and waits for nothing; that it changes no types is said."""
    seen = []

    def step() -> None:
        model = nn.Linear(4, 2, device="cuda")
        with torch.autocast("cuda", dtype=dtype):
            out = model(gpu(3, 4))
            seen.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
            loss = F.mse_loss(out.float(), gpu(3, 2))
        loss.backward()

    assert [] == waits(step)
    assert [(True, dtype)] == seen
    assert not torch.is_autocast_enabled("cuda")
    assert "autocast changed no types" in " ".join(ran(step).coverage)


def test_autocast_of_a_cache_in_half_precision() -> None:
    """A step that relies on the types of autocast ends early, which is a finding at its line."""

    def step() -> None:
        model, cache = nn.Linear(4, 2, device="cuda"), gpu(5, 2).bfloat16()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            cache[torch.arange(3, device="cuda")] = model(gpu(3, 4)).detach()

    report = dry_run(step)
    (note,) = report.not_covered
    assert isinstance(report.error, RuntimeError)
    assert note.site.code.startswith("cache[")


@pytest.mark.parametrize("clipped", [False, True])
def test_grad_scaler(clipped: bool) -> None:
    """The scaler waits once for each optimizer, to learn whether there was an infinity."""

    def step() -> None:
        models = [nn.Linear(4, 2, device="cuda") for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = sum(model(gpu(3, 4)).float().pow(2).sum() for model in models)
            scaler.scale(loss).backward()
            for model, optimizer in zip(models, optimizers, strict=True):
                if clipped:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()

    report = ran(step)
    assert [("item", 6, "scaler.step(optimizer)")] == listed(report)
    assert (3, 2.0) == (report.steps, report.per_step(only(report)))
    assert only(report).via is not None
    assert only(report).via.file.endswith("grad_scaler.py")


def test_an_infinity_makes_the_scaler_skip_the_step() -> None:
    """Values are real: the scaler sees an infinity, and halves its scale."""
    scales = []

    def step() -> None:
        weight = torch.ones(2, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        scaler.scale((weight * torch.tensor(float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), weight.tolist()))

    lines = [("item", 1, "scaler.step(optimizer)")]
    after = "scales.append((scaler.get_scale(), weight.tolist()))"
    assert [*lines, ("item", 1, after), ("tolist", 1, after)] == waits(step)
    assert [(4.0, [1.0, 1.0])] == scales


# ----------------------------------------------------------------------------------------------------- data


class Samples(Dataset[torch.Tensor]):
    """Samples whose making reads values, as augmentations do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.full((3,), float(index))
        if sample.sum().item() > 100:
            raise ValueError("unlikely")
        return sample[sample >= 0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_data_loader(workers: int, pinned: bool) -> None:
    """Batches from pinned memory are copied without waiting; the work of the workers is the CPU's alone."""
    seen = []

    def step() -> None:
        model = nn.Linear(3, 1, device="cuda")
        for batch in DataLoader(Samples(), batch_size=2, num_workers=workers, pin_memory=pinned):
            seen.append(batch.is_pinned())
            batch = batch.to("cuda", non_blocking=True)
            model(batch).sum().backward()

    report = ran(step)
    assert [] == report.not_covered
    assert [pinned] * 4 == seen
    if pinned:
        assert [] == report.syncs
    else:
        found = only(report)
        assert ("to", 4, "H2D", 4 * 2 * 3 * 4) == (found.op, found.count, found.direction, found.bytes)
        assert 'batch = batch.to("cuda", non_blocking=True)' == found.site.code
        assert "not pinned" in found.cause


def test_a_blocking_copy_from_pinned_memory_waits() -> None:
    """Without non_blocking also a pinned batch is waited for."""

    def step() -> None:
        for (batch,) in DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, pin_memory=True):
            batch.cuda()

    assert [("cuda", 2, "batch.cuda()")] == waits(step)


# ----------------------------------------------------------------------------------------------- optimizers

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (kind, {**flags, **more})
    for kind, more in (
        (torch.optim.Adam, {"amsgrad": True}), (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    )
    for flags in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True})
    if "capturable" not in flags or kind is not torch.optim.SGD
]  # fmt: skip


@pytest.mark.parametrize(("kind", "flags"), KINDS)
def test_optimizers(kind: Any, flags: dict[str, Any]) -> None:
    """Optimizers wait for nothing, however they go over the parameters."""

    def step() -> None:
        model = nn.Linear(4, 2, device="cuda")
        optimizer = kind(model.parameters(), lr=0.1, **flags)
        before = model.weight.detach().clone()
        for _ in range(3):
            model(gpu(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for state in optimizer.state.values():
            for name, held in state.items():
                if name != "step" and held is not None:
                    assert held.is_cuda
        assert before.data_ptr() != model.weight.data_ptr()

    report = ran(step)
    assert ([], [], 3) == (listed(report), report.not_covered, report.steps)


def test_optimizers_change_the_parameters() -> None:
    """The step is carried out for real."""
    weights = []

    def step() -> None:
        weight = torch.ones(2, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        weight.sum().backward()
        optimizer.step()
        weights.append(weight.tolist())

    assert [("tolist", 1, "weights.append(weight.tolist())")] == waits(step)
    assert [[0.5, 0.5]] == weights


def test_capturable_optimizers_keep_their_count_on_the_gpu() -> None:
    """A number of steps that is on the GPU is waited for where it is read, one that is on the host is not."""

    def step() -> None:
        for capturable in (False, True):
            weight = torch.ones(2, device="cuda", requires_grad=True)
            optimizer = torch.optim.Adam([weight], capturable=capturable)
            weight.sum().backward()
            optimizer.step()
            assert capturable == optimizer.state[weight]["step"].is_cuda
            optimizer.state[weight]["step"].item()

    assert [("item", 1, 'optimizer.state[weight]["step"].item()')] == waits(step)


def test_lbfgs() -> None:
    """It reads the loss, whether the gradient is small, the step's length and the slope."""

    def step() -> None:
        weight = torch.full((2,), 0.1, device="cuda", requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = weight.pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    line = "optimizer.step(closure)"
    assert [("bool", 3, line), ("float", 1, line)] == waits(step)


def test_clipping() -> None:
    """Clipping waits only where it is to raise an error."""

    def step() -> None:
        model = nn.Linear(4, 2, device="cuda")
        model(gpu(3, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    line = "nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)"
    assert [("bool", 1, line)] == waits(step)


# ------------------------------------------------------------------------------------------- torch.compile


def test_compiled_function() -> None:
    """It runs eagerly, which is said once; what it waits for is found, and the note fails nothing."""

    def double(value: torch.Tensor) -> torch.Tensor:
        if value.sum().item() > 0:
            return value * 2
        return value

    def step() -> None:
        compiled = torch.compile(double)
        for _ in range(3):
            compiled(torch.ones(2, device="cuda"))

    report = ran(step)
    assert [("item", 3, "if value.sum().item() > 0:")] == listed(report)
    (note,) = report.not_covered
    assert "eager" in note.cause
    assert 'compiled(torch.ones(2, device="cuda"))' == note.site.code
    report.assert_max(3)
    with pytest.raises(AssertionError, match="waits for the GPU 3 times; allowed: 2"):
        report.assert_max(2)


@pytest.mark.parametrize("how", ["function", "method"])
def test_compiled_module(how: str) -> None:
    """The same for modules; only the note is there where nothing waits."""

    def step() -> None:
        model: Any = nn.Linear(4, 2, device="cuda")
        if how == "method":
            model.compile()
        else:
            model = torch.compile(model)
        model(gpu(3, 4)).sum().backward()

    report = ran(step)
    assert ([], 1) == (listed(report), len(report.not_covered))
    report.assert_max(0)


def test_what_was_compiled_before() -> None:
    """A function that was compiled before the run runs eagerly inside of it, and compiled again after it."""
    calls = []

    def backend(module: Any, inputs: Any) -> Any:
        calls.append(1)
        return module.forward

    compiled = torch.compile(lambda value: value + 1, backend=backend)
    report = ran(lambda: compiled(gpu(2)).tolist())
    assert ([], 1, ["tolist"]) == (calls, len(report.not_covered), [found.op for found in report.syncs])
    compiled(torch.ones(2))
    assert [1] == calls


# ------------------------------------------------------------------------------------------------ autograd


class Scaled(torch.autograd.Function):
    """Reads a value on the way forth and on the way back."""

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
    """Waits inside of a custom function are at its lines, and the one on the way back names its node."""

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
    """Hooks of tensors are watched, before and after the gradient is added up."""

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
    """Hooks of modules are watched, on the way forth and on the way back."""

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
    """What is computed again on the way back waits again, at the same line."""

    def block(value: torch.Tensor) -> torch.Tensor:
        scale = value.max().item()
        return (value * scale).sin().exp()

    def step() -> None:
        value = gpu(3, requires_grad=True)
        out = checkpoint(block, value, use_reentrant=reentrant)
        out.sum().backward()

    assert [("item", 2, "scale = value.max().item()")] == waits(step)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_that_does_not_wait(reentrant: bool) -> None:
    """Checkpointing waits for nothing by itself, also with dropout."""

    def step() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).to("meta").to_empty(device="cuda")
        checkpoint(model, gpu(3, 4, requires_grad=True), use_reentrant=reentrant).sum().backward()

    assert [] == waits(step)


def test_saved_tensors_hooks() -> None:
    """What is saved can go through user code, which is watched."""

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
    """What is saved goes to the host and comes back: through pinned memory without a wait."""

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
    """Gradients of gradients wait for nothing; reading one does."""

    def step() -> None:
        value = gpu(3, requires_grad=True)
        (first,) = torch.autograd.grad(value.pow(3).sum(), value, create_graph=True)
        first.sum().backward()
        value.grad.sum().item()

    assert [("item", 1, "value.grad.sum().item()")] == waits(step)


# ------------------------------------------------------------------------------------- views and in-place


def test_views() -> None:
    """Views of the GPU are on the GPU, with gaps and without, and reading one waits."""

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
    """A pinned tensor with gaps is put together in memory that is not pinned first."""

    def step() -> None:
        pinned = torch.ones(4, 6, pin_memory=True)
        pinned.t().to("cuda", non_blocking=True)
        pinned[1:3].to("cuda", non_blocking=True)
        pinned[:, ::2].to("cuda", non_blocking=True)

    assert [("to", 1, 'pinned[:, ::2].to("cuda", non_blocking=True)')] == waits(step)


def test_in_place() -> None:
    """Operators in place leave tensors where they are."""

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


def test_the_host_stays_the_host() -> None:
    """A tensor of the host that takes values from the GPU waits for them, and stays where it is."""

    def step() -> None:
        host, other, value = torch.ones(4), torch.ones(4), gpu(4)
        host.copy_(value)
        other.fill_(value.mean())
        assert host.is_cpu
        assert other.is_cpu
        host.sum().item(), other.numpy(), (host + other).tolist()

    assert [("copy_", 1, "host.copy_(value)"), ("fill_", 1, "other.fill_(value.mean())")] == waits(step)


def test_on_the_host_nothing_waits() -> None:
    """The same calls on tensors of the host are no waits, also after such on the GPU."""

    def step() -> None:
        value = torch.ones(4)
        gpu(4).sum()
        value.sum().item(), value[value > 0], value.tolist(), bool(value.any()), f"{value.sum():.2f}", str(value)
        value.nonzero(), value.unique(), value.numpy(), torch.equal(value, value), torch.linalg.inv(torch.eye(2))
        value.to("cpu"), value.cpu(), value.pin_memory().cpu()

    assert [] == waits(step)


# ---------------------------------------------------------------------------------------------- torch.func


def test_func() -> None:
    """Transforms keep tensors on the GPU, and wait for nothing."""

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


def test_a_wait_inside_of_a_transform() -> None:
    """A value that is read inside of a transformed function is found at its line."""

    def scaled(value: torch.Tensor) -> torch.Tensor:
        return (value * value.detach().max().item()).sum()

    assert [("item", 1, "return (value * value.detach().max().item()).sum()")] == waits(
        lambda: grad(scaled)(gpu(3))
    )


# -------------------------------------------------------------------------------------------------- sparse


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_coo() -> None:
    """Sparse tensors with a size wait where indices are counted or merged."""

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
    """Sparse rows multiply without a wait; making them of a dense tensor counts."""

    def step() -> None:
        rows = torch.arange(4, device="cuda")
        made = torch.sparse_csr_tensor(rows, rows[:3], gpu(3), size=(3, 3))
        assert made.is_cuda
        assert (made @ gpu(3, 2)).is_cuda
        gpu(2, 2).to_sparse_csr()

    report = ran(step)
    assert ["gpu(2, 2).to_sparse_csr()"] == [found.site.code for found in report.syncs]
    assert (1, "to_sparse_csr") == (only(report).count, only(report).op)


# ---------------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("ordered", [True, False])
def test_packed_sequences(ordered: bool) -> None:
    """Packing sorted sequences waits for nothing; else the order is copied forth and back."""

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
    """Padding knows the lengths."""
    assert [] == waits(lambda: pad_sequence([gpu(3, 2), gpu(1, 2)], batch_first=True))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind: Any) -> None:
    """Recurrent modules wait for nothing, on the way forth and on the way back."""
    assert [] == waits(lambda: kind(3, 4, num_layers=2, device="cuda")(gpu(5, 2, 3))[0].sum().backward())


# ------------------------------------------------------------------------------------------ copies and files


def test_save_and_load() -> None:
    """Saving copies each storage to the host, and loading copies it to where it is asked to be."""

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
    """Pickling copies to the host, and unpickling back to the GPU."""

    def step() -> None:
        text = pickle.dumps(gpu(4))
        assert pickle.loads(text).is_cuda

    report = ran(step)
    assert ["text = pickle.dumps(gpu(4))", "assert pickle.loads(text).is_cuda"] == [
        found.site.code for found in sorted(report.syncs, key=lambda found: found.site.line)
    ]
    assert [1, 1] == [found.count for found in report.syncs]


def test_copies_within_the_gpu() -> None:
    """Copies of tensors, modules and optimizers are made on the GPU."""

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
    """A module that moves copies each of its tensors; one that changes its type does it where it is."""

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


# ------------------------------------------------------------------------------------------------ operators


def test_making_tensors() -> None:
    """What is made of Python's numbers is copied; what is filled is not."""

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
    """Without a number of classes the greatest one is read."""

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
    """Factorizations read an error code back, once; determinants, QR and those for experts do not."""
    found = waits(call)
    assert [1] * waiting == [count for _, count, _ in found]
    if found:
        assert name == found[0][0].removeprefix("linalg_")


@pytest.mark.parametrize("name", ["svd", "eigh", "inv", "cholesky", "det", "qr"])
def test_linalg_backward(name: str) -> None:
    """The way back waits only where it factorizes again."""

    def step() -> None:
        value = torch.diag(torch.arange(1.0, 4.0, device="cuda")).requires_grad_()
        out = getattr(torch.linalg, name)(value)
        first = out if isinstance(out, torch.Tensor) else out[-1]
        first.sum().backward()

    report = ran(step)
    assert [] == [found.site.code for found in report.syncs if found.backward is not None]


def test_distributions() -> None:
    """Checks of arguments and samples are read; without them nothing is."""

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
    """Comparing in tests reads whether all is close."""

    def step() -> None:
        value = gpu(3)
        torch.testing.assert_close(value, value.clone())

    assert [("bool", 1, "torch.testing.assert_close(value, value.clone())")] == waits(step)


# -------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("how", ["default", "context"])
def test_default_device(how: str) -> None:
    """A default device counts as if it were named, and is as before afterwards."""

    def made() -> None:
        assert torch.zeros(2).is_cuda
        assert nn.Linear(2, 2).weight.is_cuda
        torch.tensor([1.0])
        torch.zeros(2, device="cpu").sum().item()
        torch.ones(2).sum().item()

    def step() -> None:
        if how == "default":
            torch.set_default_device("cuda")
            made()
        else:
            with torch.device("cuda"):
                made()
            assert torch.zeros(2).is_cpu

    assert [("tensor", 1, "torch.tensor([1.0])"), ("item", 1, "torch.ones(2).sum().item()")] == waits(step)
    assert torch.zeros(2).device.type == "cpu"
    assert torch.get_default_device() == torch.device("cpu")


def test_a_default_device_of_before() -> None:
    """One that was set before the run is still there after it, whatever the step sets."""
    torch.set_default_device("meta")
    try:
        dry_run(lambda: torch.set_default_device("cuda"))
        assert torch.get_default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)


def test_moves() -> None:
    """Each way to move a tensor waits by its own name, in its own direction; one that stays does not."""

    def step() -> None:
        host, there = torch.ones(2), gpu(2)
        host.to("cuda")
        host.to(device="cuda", dtype=torch.float16)
        host.to(there)
        host.cuda()
        host.type_as(there)
        there.cpu()
        there.to("cpu")
        there.to(host)
        there.to(there), there.to(torch.float16), there.to("cuda"), host.to("cpu"), there.float()
        torch.empty(0).to("cuda")

    report = ran(step)
    expected = ["to", "to", "to", "cuda", "type_as", "cpu", "to", "to"]
    found = sorted(report.syncs, key=lambda found: found.site.line)
    assert expected == [each.op for each in found]
    assert ["H2D"] * 5 + ["D2H"] * 3 == [each.direction for each in found]
    assert [1] * 8 == [each.count for each in found]


def test_threads() -> None:
    """Threads that the step starts are watched, and named."""

    def read(value: torch.Tensor) -> None:
        value.sum().item()

    def step() -> None:
        value = gpu(3)
        threads = [threading.Thread(target=read, args=(value,), name="reader") for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    report = ran(step)
    assert [("item", 2, "value.sum().item()")] == listed(report)
    assert "reader" == only(report).thread


def test_threads_of_a_pool() -> None:
    """So are those of a pool."""
    from concurrent.futures import ThreadPoolExecutor

    def step() -> None:
        with ThreadPoolExecutor(2) as pool:
            assert [2.0] * 3 == list(
                pool.map(lambda value: value.sum().item(), [torch.ones(2, device="cuda")] * 3)
            )

    assert [3] == [count for _, count, _ in waits(step)]


def test_on_gpu() -> None:
    """What was there before the run can be said to be on the GPU; afterwards it is where it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(3, 4)
    model(batch).sum().backward()
    optimizer.step()

    def step() -> None:
        assert batch.is_cuda
        assert model[1].running_mean.is_cuda
        assert model[0].weight.grad.is_cuda
        assert optimizer.state[model[0].weight]["exp_avg"].is_cuda
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        loss.item()

    for _ in range(2):
        assert [("item", 1, "loss.item()")] == waits(step, on_gpu=[model, optimizer, batch])
        assert not batch.is_cuda
        assert model[0].weight.device == torch.device("cpu")


def test_on_gpu_takes_modules_optimizers_and_tensors() -> None:
    """Lists of tensors are taken too, and anything else is refused."""
    held = {"a": [torch.ones(2)]}
    assert ["tolist"] == [op for op, _, _ in waits(lambda: held["a"][0].tolist(), on_gpu=[held])]
    with pytest.raises(TypeError, match='"on_gpu" must hold modules, optimizers and tensors: 3'):
        dry_run(lambda: None, on_gpu=[3])


def test_nothing_on_a_gpu() -> None:
    """A step that uses no GPU is said to be so."""
    report = ran(lambda: torch.ones(2).sum().item())
    assert [] == report.findings
    assert report.unavailable_reason.startswith("nothing was on a GPU")
    with pytest.raises(AssertionError, match="nothing could be checked"):
        report.assert_max(10)
    assert "" == ran(lambda: gpu(2)).unavailable_reason


def test_data_parallel_over_one_gpu() -> None:
    """`DataParallel` over the one GPU calls the module itself."""

    def step() -> None:
        model = nn.DataParallel(nn.Linear(4, 2, device="cuda"))
        model(gpu(3, 4)).sum().backward()

    assert [] == waits(step)


# ------------------------------------------------------------------------------------------- outermost call


class Wrapped:
    """Iterates over what it holds, as loaders that move batches do."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        self._held = held

    def __iter__(self) -> Iterator[torch.Tensor]:
        for each in self._held:
            yield each.to("cuda", non_blocking=True)


def test_generators() -> None:
    """A wait inside of a generator is at its line."""

    def step() -> None:
        for batch in Wrapped([torch.ones(2), torch.ones(2).pin_memory()]):
            batch.sum()

    assert [("to", 1, 'yield each.to("cuda", non_blocking=True)')] == waits(step)


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda value: value.unique(), "unique"),
        (lambda value: torch.allclose(value, value), "allclose"),
        (lambda value: value[value > 0], "getitem"),
        (lambda value: torch.where(value > 0), "where"),
        (lambda value: str(value), "print"),
        (lambda value: f"{value.sum():.3f}", "format"),
        (lambda value: 1.0 in value, "contains"),
        (lambda value: value.tolist(), "tolist"),
        (lambda value: bool(value.sum() > 0), "bool"),
        (lambda value: int(value.sum()), "int"),
        (lambda value: [1, 2][value.sum().long() * 0], "int"),
        (lambda value: torch.cuda.synchronize(), "synchronize"),
        (lambda value: torch.cuda.current_stream().synchronize(), "synchronize"),
    ],
)  # fmt: skip
def test_one_call_is_one_wait(call: Callable[[Any], Any], op: str) -> None:
    """Whatever a call reads inside, it is one wait, named after the call."""

    def step() -> None:
        call(torch.ones(4, device="cuda"))

    assert [(op, 1)] == [(name, count) for name, count, _ in waits(step)]
