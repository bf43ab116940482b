"""Autocast in a dry run: its operators, its contexts, its cache, and that nothing of it stays."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import instrument
from instrument.syncs.dryrun import autocast

from .autocast_cases import outcomes

ALL = (
    *autocast.LOWER_PRECISION, *autocast.FLOAT, *autocast.FLOAT_RESULT, *autocast.NORMS, *autocast.WIDEST,
    *autocast.REFUSED,
)  # fmt: skip
HALF, FLOAT, BFLOAT = torch.float16, torch.float32, torch.bfloat16


def kernels(key: str) -> set[str]:
    """Return the operators that have a kernel for a dispatch key."""
    bindings: Any = torch._C
    names = [name for name in bindings._dispatch_get_all_op_names() if name.startswith("aten::")]
    held = bindings._dispatch_has_kernel_for_dispatch_key
    return {name.removeprefix("aten::") for name in names if held(name, key)}


def test_the_operators_are_those_of_torch() -> None:
    """Each operator for which torch has a policy on CUDA has one here, and no other."""
    assert set(ALL) == kernels("AutocastCUDA")
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize("low", [HALF, BFLOAT])
def test_types_of_results(low: torch.dtype) -> None:
    """Operators compute in the lower precision, in 32 bits, in the widest type, or as they are given."""
    cases = {
        "x @ y": low, "F.linear(x, y, x[0])": low, "F.conv2d(im, w)": low, "torch.einsum('ij,jk->ik', x, y)": low,
        "torch.softmax(h, 1)": FLOAT, "F.layer_norm(h, (4,))": FLOAT, "F.cross_entropy(h, i)": FLOAT,
        "h.sum(0, dtype=low)": low, "torch.sum(h)": FLOAT, "torch.norm(h, 2, 1)": FLOAT, "torch.exp(h)": FLOAT,
        "torch.dot(h[0], x[0])": FLOAT, "torch.vdot(h[0], h[0])": low, "h + x": FLOAT, "h + h": low,
        "d @ d": torch.float64,
    }  # fmt: skip
    found = dict[str, str]()
    instrument.dry_run(lambda: found.update(outcomes(low, cases)))
    assert {case: result.split()[0] for case, result in found.items()} == {
        case: str(dtype) for case, dtype in cases.items()
    }


def test_contexts() -> None:
    """Nested ones hold, one that is disabled casts nothing, and functions can ask for a type."""
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FLOAT)
        def forward(ctx: Any, x: Any) -> Any:
            seen.append((x @ x).dtype)
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: Any) -> Any:
            seen.append((gradient @ gradient).dtype)
            return gradient * 2

    def step() -> None:
        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        y = x.detach()  # of a leaf that needs a gradient, torch keeps the cast of the inner context
        with torch.autocast("cuda", BFLOAT):
            with torch.autocast("cuda", HALF):
                seen.append((y @ y).dtype)
            with torch.autocast("cuda", enabled=False):
                seen.append((y @ y).dtype)
            seen.append((y @ y).dtype)
            out = Double.apply(x)
        seen.append((x @ x).dtype)
        out.sum().backward()

    assert instrument.dry_run(step).error is None
    assert seen == [HALF, FLOAT, BFLOAT, FLOAT, FLOAT, FLOAT]


def test_only_tensors_on_the_gpu() -> None:
    """Those on the CPU, and on other threads, are as they were; autocast for the CPU is another one."""
    seen = []

    def step() -> None:
        here, there = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
        with torch.autocast("cuda", HALF):
            seen.extend([(here @ here).dtype, (there @ there).dtype, torch.is_autocast_enabled("cpu")])
            thread = threading.Thread(target=lambda: seen.append((there @ there).dtype))
            thread.start()
            thread.join()
        with torch.autocast("cpu", BFLOAT):
            seen.append((here @ here).dtype)

    assert instrument.dry_run(step).error is None
    assert seen == [FLOAT, HALF, False, FLOAT, BFLOAT]


@pytest.mark.parametrize(("cached", "casts"), [(True, 1), (False, 3)])
def test_the_cache(cached: bool, casts: int) -> None:
    """A parameter is cast once in a context, unless the program turns that off."""
    seen = []

    def step() -> None:
        model, x = nn.Linear(3, 3, bias=False, device="cuda"), torch.ones(2, 3, device="cuda", dtype=HALF)
        with torch.autocast("cuda", HALF, cache_enabled=cached):
            graphs: Any = [model(x).grad_fn for _ in range(3)]
        nodes = [graph.next_functions[1][0].next_functions[0][0] for graph in graphs]
        seen.append(len(set(nodes)))

    assert instrument.dry_run(step).error is None
    assert seen == [casts]


@pytest.mark.parametrize("fake", [False, True])
def test_a_training(fake: bool) -> None:
    """Results have the lower precision, and gradients that of the parameters, also with checkpointing."""
    seen = []

    def step() -> None:
        model, head = nn.Linear(4, 4, device="cuda"), nn.Linear(4, 2, device="cuda")
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
        scaler = torch.amp.GradScaler("cuda")
        model.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        with torch.autocast("cuda", HALF):
            hidden = torch.utils.checkpoint.checkpoint(
                model, torch.ones(3, 4, device="cuda", requires_grad=True), use_reentrant=False
            )
            out = head(hidden)
            loss = F.cross_entropy(out, torch.zeros(3, dtype=torch.int64, device="cuda"))
        scaler.scale(loss).backward()
        seen.extend([out.dtype, loss.dtype, head.weight.grad.dtype])
        scaler.step(optimizer)
        scaler.update()

    report = instrument.dry_run(step, fake=fake)
    assert report.error is None
    assert seen == [HALF, HALF, FLOAT, FLOAT]


@pytest.mark.parametrize("value", [FLOAT, BFLOAT])
def test_attention_is_chosen_by_the_types_after_the_cast(value: torch.dtype) -> None:
    """Queries, keys, values and mask are cast first, whatever their types: flash attention runs."""

    def step() -> None:
        q, k, v = (torch.ones(2, 4, 8, 16, device="cuda", requires_grad=True) for _ in range(3))
        mask = torch.zeros(8, 8, device="cuda")
        with torch.autocast("cuda", BFLOAT):
            out = F.scaled_dot_product_attention(q, k, v.to(value))
            F.scaled_dot_product_attention(q, k, v.to(value), mask)
        assert out.dtype is BFLOAT
        out.sum().backward()
        assert q.grad is not None and q.grad.dtype is FLOAT

    found = types_by_operator(step)
    assert found["_scaled_dot_product_flash_attention"] == [BFLOAT] * 3
    assert found["_scaled_dot_product_flash_attention_backward"][:4] == [BFLOAT] * 4
    assert found["_scaled_dot_product_efficient_attention"] == [BFLOAT] * 4


def test_rms_norm_is_of_32_bits() -> None:
    """Its input is cast, and it is one operator then."""

    def step() -> None:
        norm, x = nn.RMSNorm(8, device="cuda"), torch.ones(2, 8, device="cuda", dtype=BFLOAT, requires_grad=True)
        with torch.autocast("cuda", BFLOAT):
            norm(x).sum().backward()

    found = types_by_operator(step)
    assert found["_fused_rms_norm"] == [FLOAT] * 2
    assert found["_fused_rms_norm_backward"][:2] == [FLOAT] * 2
    assert "rsqrt" not in found


def types_by_operator(step: Any) -> dict[str, list[torch.dtype]]:
    """Return the types of the tensors that each operator of a step takes."""
    report = instrument.dry_run(step)
    assert report.finished, report.ended
    assert report.counts is not None
    calls = report.counts.record.calls
    return {call.name.removeprefix("aten::"): [each.dtype for each in call.tensors] for call in calls}


def test_refused() -> None:
    """The loss that is unsafe in a lower precision is an error, as on CUDA."""

    def step() -> None:
        x = torch.full((2, 2), 0.5, device="cuda")
        with torch.autocast("cuda", HALF):
            F.binary_cross_entropy(x, x)

    with pytest.raises(AssertionError, match="unsafe to autocast"):
        instrument.dry_run(step).assert_max(0)


def test_nothing_stays(unchanged: None) -> None:
    """After a run, also one that ends inside the context, no operator has a policy of ours."""

    def step() -> None:
        x = torch.ones(2, 2, device="cuda")
        torch.autocast("cuda", HALF).__enter__()
        assert (x @ x).dtype is HALF
        raise ValueError

    report = instrument.dry_run(step)
    torch.set_autocast_enabled("cuda", False)
    torch.autocast_decrement_nesting()
    assert isinstance(report.error, ValueError)
    assert kernels("AutocastIPU") == set()
    assert not torch._C._dispatch_tls_is_dispatch_key_included("AutocastIPU")
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FLOAT


def test_threads_inside_the_context_when_a_run_ends() -> None:
    """They go on without policies, also in a later run, until they leave the context."""
    with ThreadPoolExecutor(1) as pool:

        def dtype_there(on: str) -> torch.dtype:
            x = torch.ones(2, 2, device=on)
            return pool.submit(lambda: (x @ x).dtype).result()

        def step() -> None:
            pool.submit(torch.autocast("cuda", HALF).__enter__).result()
            seen.append(dtype_there("cuda"))

        def later() -> None:
            with torch.autocast("cuda", HALF):
                seen.append(dtype_there("cuda"))

        seen: list[torch.dtype] = []
        assert instrument.dry_run(step).error is None
        seen.append(dtype_there("cpu"))
        pool.submit(torch.set_autocast_enabled, "cuda", False).result()
        assert instrument.dry_run(later).error is None
        pool.submit(torch.autocast_decrement_nesting).result()
    assert seen == [HALF, FLOAT, FLOAT]
