"""Counts of a dry run: operators, kernels, operations, copies and collectives of a step."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import instrument
from instrument.explain.contract.region_tree import RegionTree
from instrument.syncs.counting.counts import Counts
from instrument.syncs.counting.step_counts import Copies

Train = Callable[[], None]


def counts(run: Callable[[], Any], **options: Any) -> Counts:
    """Return the counts of a run that came to its end."""
    report = instrument.dry_run(run, **options)
    if report.error is not None:
        raise report.error
    assert report.counts is not None
    return report.counts


def training(steps: int = 3, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> Train:
    """Return a training of two layers, from 8 x 32 over 64 to 4 features."""

    def train() -> None:
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
        updates = optimizer(model.parameters(), lr=1e-3, **options)
        x = torch.randn(8, 32, device="cuda")
        for _ in range(steps):
            functional.mse_loss(model(x), torch.zeros(8, 4, device="cuda")).backward()
            updates.step()
            updates.zero_grad()

    return train


def test_operations_by_pass() -> None:
    """Forward is two matmuls; backward two for each but for the gradient of the input, which needs none."""
    step = counts(training()).step
    first, second = 2 * 8 * 32 * 64, 2 * 8 * 64 * 4
    assert {"matmul": {"forward": first + second, "backward": first + 2 * second}} == step.flops
    assert 5 == step.kernels["gemm"]
    assert 2 * first + 3 * second == step.flop_count


@pytest.mark.parametrize(
    ("options", "kind", "kernels"),
    [({}, "foreach", 8), ({"fused": True}, "fused", 2), ({"foreach": False}, "single", 0)],
)
def test_ways_of_the_optimizer(options: dict[str, Any], kind: str, kernels: int) -> None:
    """The optimizer's default on CUDA is over lists of tensors; fused, it adds to the step numbers and updates."""
    step = counts(training(**options)).step
    assert (kind, kernels) == (step.optimizer, step.kernels.get("optimizer", 0))


@pytest.mark.parametrize(("options", "kind"), [({}, "foreach"), ({"foreach": False}, "single")])
def test_clipping_is_no_way_of_the_optimizer(options: dict[str, Any], kind: str) -> None:
    """Clipping is over lists of tensors, whatever the optimizer does."""

    def train() -> None:
        model = nn.Linear(8, 8).cuda()
        updates = torch.optim.AdamW(model.parameters(), **options)
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        updates.step()

    assert kind == counts(train).step.optimizer


def test_same_without_data() -> None:
    """Tensors without data give the same counts."""
    real, fake = (counts(training(), fake=fake).step for fake in (False, True))
    assert real == fake


def test_same_in_each_run() -> None:
    """A run has the same counts each time."""
    assert counts(training()).as_dict() == counts(training()).as_dict()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_unusual_steps_are_not_typical(optimizer: Any) -> None:
    """A step is typical if most have the same operators and shapes; numbers, as of Adam's bias, may differ."""

    def train() -> None:
        model = nn.Linear(8, 8).cuda()
        updates = optimizer(model.parameters(), lr=0.1)
        for step, rows in enumerate((4, 3, 5, 4, 4)):
            loss = model(torch.ones(rows, 8, device="cuda")).sum() * (step + 1)
            loss.backward()
            updates.step()

    assert 4 == counts(train).step.step


def test_typical_step() -> None:
    """The first step has the state of the optimizer besides."""
    both = counts(training(5))
    assert (2, 5) == (both.step.step, both.steps)
    assert both.first.kernels["fill"] == both.step.kernels["fill"] + 8
    numbers = sorted({step for _, step in both.record.marks if step})
    assert numbers == [2, 3, 4, 5]  # what is before the first update has no number


def test_a_call_without_update_is_one_step() -> None:
    """Without an optimizer, everything is the step."""
    both = counts(lambda: torch.ones(4, device="cuda") * 2)
    assert (1, 1, {"fill": 1, "elementwise": 1}) == (both.steps, both.step.step, both.step.kernels)
    assert both.first == both.step


def test_nothing_on_a_gpu() -> None:
    """Without an operator on a GPU, all counts are zero."""
    assert (0, 0) == ((step := counts(lambda: torch.ones(2)).step).operators, step.kernel_count)


def test_copies() -> None:
    """Copies have a direction, and pinned memory or not."""

    def step() -> None:
        x = torch.ones(100).cuda()
        y = torch.ones(50, dtype=torch.float64).pin_memory().to("cuda", non_blocking=True)
        z = torch.tensor([1, 2, 3], device="cuda")
        print(x.sum().item(), y.cpu().tolist(), z.tolist())
        x.copy_(torch.zeros(100))

    got = counts(step).step
    assert [
        Copies("D2H", False, 3, 4 + 400 + 24),
        Copies("H2D", False, 3, 400 + 24 + 400),
        Copies("H2D", True, 1, 400),
    ] == got.copies
    assert 6 == got.synchronizations


@pytest.mark.parametrize("number", [2, 12])
def test_copies_of_lists(number: int) -> None:
    """A list that is copied between CPU and GPU is so many copies, however long it is."""

    def step() -> None:
        here, there = ([torch.ones(5, device=device) for _ in range(number)] for device in ("cpu", "cuda"))
        torch._foreach_copy_(here, there)
        torch._foreach_copy_(there, here)
        torch._foreach_copy_(there[1:], there[:-1])
        torch._foreach_copy_(there[1:], here[1:])

    up, down = 2 * number - 1, number
    assert [Copies("D2H", False, down, 20 * down), Copies("H2D", False, up, 20 * up)] == counts(step).step.copies


def test_places_of_waits() -> None:
    """The record has after which operators the CPU waits."""

    def step() -> None:
        x = torch.ones(4, device="cuda")
        mask = x > 0
        torch.cuda.synchronize()
        x.add_(1)
        x[mask]
        x.mul_(2)
        x.nonzero()
        torch.empty(4, pin_memory=True).copy_(x)
        x.sub_(1).sum().item()
        x.cpu()
        x.to("cpu", non_blocking=True)  # into pinned memory

    record = counts(step).record
    waits = [record.calls[record.order[2 * note.position - 2]].name for note in record.notes]
    names = ["gt", "index", "nonzero", "copy_", "_local_scalar_dense", "_to_copy"]
    assert [f"aten::{name}" for name in names] == waits


def test_bytes() -> None:
    """A kernel reads its distinct inputs and writes its results; expanded dimensions are read once."""

    def step() -> None:
        x = torch.empty(10, 10, device="cuda")
        torch.add(x, x)
        torch.add(x, torch.empty(10, 1, device="cuda").expand(10, 10))
        x.fill_(1)

    got = counts(step).step
    assert (400 + 400 + 40, 3 * 400) == (got.read, got.written)


def moved(run: Callable[[], Any], name: str) -> tuple[int, int]:
    """Return what the operator with this name reads and writes in a run."""
    (row,) = (row for row in counts(run).step.by("operator") if row.name == f"aten::{name}")
    return row.read, row.written


@pytest.mark.parametrize(
    ("kind", "name", "states"),
    [
        (torch.optim.AdamW, "_fused_adamw_", 2),
        (functools.partial(torch.optim.SGD, momentum=0.9), "_fused_sgd_", 1),
    ],
)
def test_bytes_of_fused_optimizers(kind: Any, name: str, states: int) -> None:
    """They read parameters, gradients, state and the numbers of steps, and write parameters and state."""

    def step() -> None:
        weight = torch.zeros(100, device="cuda", requires_grad=True)
        weight.grad = torch.zeros(100, device="cuda")
        kind([weight], fused=True).step()

    read, written = moved(step, name)
    assert (400 * (2 + states), 400 * (1 + states)) == (read - (4 if states == 2 else 0), written)


SCATTERED: dict[str, tuple[Callable[[Any, Any], Any], int, int]] = {
    "index_put_": (lambda x, i: x.__setitem__(i, 0.0), 40, 5 * 80),
    "_index_put_impl_": (
        lambda x, i: x.index_put_((i,), torch.ones_like(x[:5]), accumulate=True),
        40 + 2 * 5 * 80,
        5 * 80,
    ),
    "index_fill_": (lambda x, i: x.index_fill_(0, i, 0.0), 40, 5 * 80),
    "index_copy_": (lambda x, i: x.index_copy_(0, i, torch.ones_like(x[:5])), 40 + 5 * 80, 5 * 80),
    "index_add_": (lambda x, i: x.index_add_(1, i, torch.ones_like(x[:, :5])), 40 + 2 * 10 * 20, 10 * 20),
    "scatter_": (lambda x, i: x.scatter_(0, i[:, None], 1.0), 40, 20),
    "scatter_add_": (lambda x, i: x.scatter_add_(0, i[:, None], torch.ones_like(x[:5, :1])), 40 + 2 * 20, 20),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_bytes_of_scattered_writes(name: str) -> None:
    """As many elements are written as the index names, with the rest of their rows; sums read them, too."""
    run, read, written = SCATTERED[name]

    def step() -> None:
        run(torch.zeros(10, 20, device="cuda"), torch.arange(5, device="cuda"))

    assert (read, written) == moved(step, name.replace("_index_put_impl_", "index_put_"))


def test_bytes_of_masked_writes() -> None:
    """The number of elements is that of the values, or at most that of the mask."""

    def step() -> None:
        x = torch.zeros(10, 20, device="cuda")
        mask = torch.arange(10, device="cuda") < 3
        x[mask] = torch.ones(3, 20, device="cuda")

    assert (10 + 3 * 80, 3 * 80) == moved(step, "index_put_")


def test_recomputed() -> None:
    """What checkpointing runs again is a pass of its own, with the operations of the forward pass."""

    def step() -> None:
        layer = nn.Linear(16, 16).cuda()
        x = torch.ones(4, 16, device="cuda", requires_grad=True)
        checkpoint(lambda x: layer(x).relu(), x, use_reentrant=False).sum().backward()

    once = 2 * 4 * 16 * 16
    assert {"matmul": {"forward": once, "backward": 2 * once, "recomputed": once}} == counts(step).step.flops


def test_create_graph_is_no_recomputation() -> None:
    """A backward pass whose gradients need gradients is still one."""

    def step() -> None:
        x = torch.ones(4, device="cuda", requires_grad=True)
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        gradient.sum().backward()

    assert {"forward", "backward"} == {row.name for row in counts(step).step.by("phase")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_cuda(dtype: torch.dtype) -> None:
    """Attention is one operator, as on CUDA, with the operations of both of its matmuls; backward has five."""

    def step() -> None:
        q, k, v = (torch.randn(2, 4, 24, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    got = counts(step).step
    once = 2 * 2 * 4 * 24 * 24 * 16
    assert {"attention": {"forward": 2 * once, "backward": 5 * once}} == got.flops
    kind = "efficient" if dtype is torch.float32 else "flash"
    assert f"aten::_scaled_dot_product_{kind}_attention" in {row.name for row in got.by("operator")}


def test_attention_has_the_same_gradients() -> None:
    """The substitute computes what the CPU computes, also with a mask."""
    tensors = [torch.randn(2, 2, 6, 8, dtype=torch.float32) for _ in range(3)]
    mask = torch.rand(6, 6) > 0.3

    def run(device: str) -> list[torch.Tensor]:
        given = [each.clone().to(device).requires_grad_() for each in tensors]
        out = functional.scaled_dot_product_attention(*given, mask.to(device))
        return [each.detach().cpu() for each in (out, *torch.autograd.grad((out**2).sum(), given))]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = run("cpu")
    got: list[torch.Tensor] = []
    counts(lambda: got.extend(run("cuda")))
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other)


def test_rms_norm_has_the_same_gradients() -> None:
    """As for attention, and gradients of gradients."""
    x, weight = torch.randn(3, 8), torch.randn(8)

    def run(device: str) -> list[torch.Tensor]:
        given = [each.clone().to(device).requires_grad_() for each in (x, weight)]
        out = functional.rms_norm(given[0], (8,), given[1])
        first = torch.autograd.grad(out.cos().sum(), given, create_graph=True)
        second = torch.autograd.grad((first[0] ** 2).sum(), given)
        return [each.detach().cpu() for each in (out, *first, *second)]

    got: list[torch.Tensor] = []
    names = {row.name for row in counts(lambda: got.extend(run("cuda"))).step.by("operator")}
    assert {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"} <= names
    for one, other in zip(run("cpu"), got, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("enabled", "name"), [(True, "aten::cudnn_batch_norm"), (False, "aten::native_batch_norm")]
)
def test_batch_norm_of_cudnn(enabled: bool, name: str) -> None:
    """Batch norm is cuDNN's, unless that is off."""

    def step() -> None:
        with torch.backends.cudnn.flags(enabled=enabled):
            nn.BatchNorm2d(4).cuda()(torch.ones(2, 4, 3, 3, device="cuda"))

    assert name in {row.name for row in counts(step).step.by("operator")}


def test_collectives(tmp_path: Path) -> None:
    """A collective counts with its group and bytes."""

    def step() -> None:
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
        )
        try:
            torch.distributed.all_reduce(torch.ones(25, device="cuda"))
            torch.distributed.all_reduce(torch.ones(5, device="cuda"))
        finally:
            torch.distributed.destroy_process_group()

    report = instrument.dry_run(step)
    assert report.counts is not None
    (made,) = report.counts.step.collectives
    assert ("c10d::allreduce_", 2, 120) == (made.name, made.count, made.bytes)
    assert made.group
    assert {made.group: 120} == bytes_by_group(report.numbers)
    assert 120 == report.numbers["collective_bytes"]


def bytes_by_group(numbers: Mapping[str, int]) -> dict[str, int]:
    begin = "collective_bytes."
    return {name.removeprefix(begin): value for name, value in numbers.items() if name.startswith(begin)}


def test_sharded_training() -> None:
    """FSDP2 on one of four ranks gathers the parameters once, and sends each gradient once."""
    fakes = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    distributed = torch.distributed

    def step() -> None:
        distributed.init_process_group("fake", store=fakes.FakeStore(), rank=0, world_size=4)
        try:
            mesh = distributed.device_mesh.init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))
            model = nn.Linear(64, 64, device="cuda")
            fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
            fully_shard(model, mesh=mesh)
            model(torch.randn(2, 64, device="cuda")).sum().backward()
        finally:
            distributed.destroy_process_group()

    report = instrument.dry_run(step)
    assert report.error is None
    assert report.counts is not None
    size = 4 * (64 * 64 + 64)
    made = {each.name: each.bytes for each in report.counts.step.collectives}
    assert {"c10d::_allgather_base_": size, "c10d::_reduce_scatter_base_": size} == made
    assert [2 * size] == [*bytes_by_group(report.numbers).values()]


def test_modules_in_place_of_regions(tmp_path: Path) -> None:
    """A step without regions has its modules as the tree, and the file says so."""

    def step(layers: int, named: bool = False) -> None:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(layers)]).cuda()
        with instrument.annotate("forward") if named else nullcontext():
            model(torch.ones(2, 4, device="cuda"))

    def tree(*args: Any) -> RegionTree:
        found = instrument.dry_run(lambda: step(*args)).regions
        assert found is not None
        return found

    modules = tree(10)
    assert "Sequential\n  *  x10\n    0  x10\n    1  x10" == str(modules)
    modules.write(tmp_path / "tree.txt")
    assert (tmp_path / "tree.txt").read_text().startswith("# The modules of a training step without regions")
    held = RegionTree.read(tmp_path / "tree.txt")
    assert held == modules
    assert [] == held.changes(tree(10))
    assert held.changes(tree(12))
    assert "forward" == str(tree(10, True))
    assert not tree(10, True).of_modules


def test_memory_while_it_runs() -> None:
    """What torch says of the memory is that of the counted allocations, and of the peak at the end."""
    seen: list[Any] = []

    def step() -> None:
        kept = torch.ones(1000, 1000, device="cuda")
        del kept
        seen.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
        torch.cuda.reset_peak_memory_stats()
        seen.append((torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()))
        torch.cuda.empty_cache()
        seen.append((torch.cuda.memory_reserved(), torch.cuda.memory_stats()["reserved_bytes.all.current"]))
        training()()
        seen.append(torch.cuda.max_memory_allocated())

    report = instrument.dry_run(step)
    assert report.memory is not None
    assert [(0, 4_000_256), (0, 20 << 20), (0, 0), report.memory.peak_bytes] == seen


def test_unknown_kernels_and_data() -> None:
    """An operator whose kernels are not known is named, and one whose results depend on data."""

    def step() -> None:
        x = torch.ones(4, 4, device="cuda")
        torch.linalg.eigvalsh(x)
        x.nonzero()

    got = counts(step).step
    assert ["aten::nonzero"] == got.by_data
    assert {"aten::_linalg_eigh": 1} == got.unknown


def test_text_and_json() -> None:
    """The text names the step and its kernels; JSON has the same numbers."""
    both = counts(training())
    text = str(both)
    assert text.startswith("Counts of step 2 of 3\n")
    assert "5 gemm" in text
    assert "foreach" in text
    assert both.step.kernels == json.loads(both.to_json())["step"]["kernels"]


def test_wrong_rows() -> None:
    """An unknown kind of rows is an error."""
    with pytest.raises(ValueError, match='"what" must be one of phase, region'):
        counts(training()).step.by("color")  # type: ignore[arg-type]


def test_recurrent_layers() -> None:
    """Each element of a sequence meets both weights of each layer; the backward pass takes twice as much."""
    layer = nn.LSTM(16, 32, num_layers=2)

    def step() -> None:
        layer(torch.ones(5, 3, 16, device="cuda"))[0].sum().backward()

    forward = 2 * 5 * 3 * 4 * 32 * ((16 + 32) + (32 + 32))
    flops = instrument.dry_run(step, on_gpu=[layer]).counts.step.flops["matmul"]
    assert {"forward": forward, "backward": 2 * forward} == flops
