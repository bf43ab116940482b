"""Values under `numerics()` are those of the CPU, and the kernels are those without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests import simgpu
from tests.simgpu.programs import output, run

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]

Program = Callable[[str], list[Tensor]]


def trained(
    model: nn.Module, device: str, loss_of: Callable[[nn.Module, int], Tensor],
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
) -> list[Tensor]:  # fmt: skip
    """Return the losses of three steps, and the parameters."""
    model = model.to(device)
    optimizer = make_optimizer(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def a_perceptron(device: str) -> list[Tensor]:
    x, y = torch.randn(8, 16).to(device), torch.randn(8, 4).to(device)
    return trained(mlp(), device, lambda model, step: functional.mse_loss(model(x), y))


def convolutions(device: str) -> list[Tensor]:
    x, y = torch.randn(4, 3, 16, 16).to(device), torch.randint(5, (4,)).to(device)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    return trained(model, device, lambda model, step: functional.cross_entropy(model(x), y))


def a_transformer(device: str) -> list[Tensor]:
    x = torch.randn(2, 12, 32).to(device)
    mask = nn.Transformer.generate_square_subsequent_mask(12).to(device)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    # The gradient of a bias of the keys is 0 but for rounding, which Adam would make large.
    return trained(model, device, lambda model, step: model(x, mask=mask).square().mean(), torch.optim.SGD)


def attention(device: str) -> list[Tensor]:
    results = []
    for dtype in (torch.float32, torch.float16):
        inputs = [torch.randn(2, 4, 24, 16).to(device, dtype).requires_grad_() for _ in range(3)]
        for causal in (True, False):
            query, key, value = inputs
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
            out.float().square().sum().backward()
            results.append(out.detach().float())
        results += [each.grad.float() for each in inputs if each.grad is not None]
    return results


def rms_norms(device: str) -> list[Tensor]:
    x = torch.randn(6, 5, 16).to(device).requires_grad_()
    normed = nn.RMSNorm(16).to(device)
    loss = (functional.rms_norm(normed(x), (5, 16)) ** 3).sum()
    loss.backward()
    assert x.grad is not None and normed.weight.grad is not None
    return [loss, x.grad, normed.weight.grad]


def embeddings(device: str) -> list[Tensor]:
    tokens, targets = torch.randint(50, (4, 9)).to(device), torch.randint(50, (36,)).to(device)
    targets[::5] = -100
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50), nn.Flatten(0, 1))
    return trained(model, device, lambda model, step: functional.cross_entropy(model(tokens), targets))


def scaled(device: str) -> list[Tensor]:
    """AMP in 16 bits: the third step overflows, and is skipped."""
    model = nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    x, results = torch.randn(8, 16).to(device), []
    for step in range(5):
        with torch.autocast(device, dtype=torch.float16):
            loss = model(x * (1e30 if step == 2 else 1)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        results.append(torch.tensor(scaler.get_scale()))
    return [*results, *model.parameters()]


def in_bfloat16(device: str) -> list[Tensor]:
    x, y = torch.randn(8, 16).to(device), torch.randint(4, (8,)).to(device)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return functional.cross_entropy(model(x), y)

    return trained(mlp(), device, loss_of)


def accumulation(device: str) -> list[Tensor]:
    batches = torch.randn(6, 8, 16).to(device)
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for number, batch in enumerate(batches):
        (model(batch).square().mean() / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def checkpointing(device: str) -> list[Tensor]:
    x = torch.randn(8, 16).to(device)
    return trained(mlp(), device, lambda model, step: checkpoint(model, x, use_reentrant=False).sum())


def masks(device: str) -> list[Tensor]:
    x = torch.randn(6, 8).to(device)
    chosen, places = x[x > 0], torch.nonzero(x > 0.5)
    values, indices = x.topk(3)
    ordered, order = x.flatten().sort()
    y = x.clone()
    y[y < 0] = 7
    y[torch.tensor([0, 2]).to(device)] += 1
    kinds, counts = torch.unique((x * 2).long(), return_counts=True)
    rows = torch.unique((x > 0).long()[:, :2], dim=0)
    repeated = torch.repeat_interleave(torch.tensor([2, 0, 3]).to(device))
    results = [chosen, places, values, indices, ordered, order, y, kinds, counts, rows, repeated]
    results += [
        torch.bincount(repeated),
        torch.where(x > 0, x, 0),
        x.masked_select(x < 0),
        x.argmax(1),
        x.cumsum(0),
    ]
    results.append(torch.view_as_complex(x.view(6, 4, 2)).conj().imag)
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, y)
    return results


def recurrent(device: str) -> list[Tensor]:
    x = torch.randn(5, 3, 8).to(device)
    results = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        results += trained(kind(8, 6, num_layers=2), device, lambda model, step: model(x)[0].square().sum())
    return results


def two_streams(device: str) -> list[Tensor]:
    x = torch.randn(32, 32).to(device)
    if device == "cpu":
        return [x @ x + x.relu()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x @ x
    z = x.relu()
    torch.cuda.current_stream().wait_stream(side)
    return [y + z]


def a_pinned_loader(device: str) -> list[Tensor]:
    data = torch.utils.data.TensorDataset(torch.randn(12, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=device != "cpu")
    batches = [batch.to(device, non_blocking=True) for (batch,) in loader]
    return trained(mlp(), device, lambda model, step: model(batches[step]).square().mean())


PROGRAMS: list[Program] = [
    a_perceptron, convolutions, a_transformer, attention, rms_norms, embeddings, scaled, in_bfloat16, accumulation,
    checkpointing, masks, recurrent, two_streams, a_pinned_loader,
]  # fmt: skip

# Their kernels depend on values.
DEPENDENT = (scaled, masks)


def results_of(program: Program, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [each.detach() for each in program(device)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_values_are_those_of_the_cpu(program: Program) -> None:
    expected = results_of(program, "cpu")

    with simgpu.numerics():
        found = [each.cpu() for each in results_of(program, "cuda")]

    tolerance = 3e-2 if program in (scaled, in_bfloat16) else 2e-3 if program is attention else 1e-4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "program", [each for each in PROGRAMS if each not in DEPENDENT], ids=lambda program: program.__name__
)
def test_kernels_are_those_without_values(program: Program) -> None:
    results_of(program, "cuda")  # what is made once
    logs = []
    for context in (simgpu.configured, simgpu.numerics):
        with simgpu.log() as entries, context():
            results_of(program, "cuda")
            torch.cuda.synchronize()
        logs.append([(entry.kind, entry.name, entry.bytes) for entry in entries if not entry.returned])

    assert logs[0] == logs[1]


@pytest.fixture
def values() -> Iterator[None]:
    with simgpu.numerics():
        yield


def test_a_seed_gives_the_same_numbers_again(values: None) -> None:
    def drawn() -> list[Tensor]:
        torch.cuda.manual_seed(5)
        x = torch.randn(1000, device="cuda")
        return [x, functional.dropout(x, 0.5), torch.randperm(9, device="cuda"), x.clone().uniform_()]

    first, second = drawn(), drawn()

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], torch.randn(1000, device="cuda"))
    assert 400 < int((first[1] == 0).sum()) < 600
    assert abs(first[0].mean().item()) < 0.2


def test_a_checkpoint_draws_its_dropout_again(values: None) -> None:
    torch.manual_seed(0)
    x = torch.ones(100, device="cuda", requires_grad=True)

    y = checkpoint(functional.dropout, x, 0.5, use_reentrant=False)
    y.sum().backward()

    assert x.grad is not None
    assert torch.equal(x.grad, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_with_dropout_has_one_mask_forward_and_backward(values: None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, 32, 32, device="cuda", dtype=dtype) for _ in range(2))
    v = torch.eye(32, device="cuda", dtype=dtype).expand(1, 2, 32, 32).contiguous().requires_grad_()

    out = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)  # v is the identity: out has the mask
    out.sum().backward()

    assert 0.4 < (out == 0).float().mean().item() < 0.6
    assert v.grad is not None
    torch.testing.assert_close(v.grad[..., 0], out.sum(-2), rtol=1e-2, atol=1e-2)


def test_a_replay_computes_what_was_captured(values: None) -> None:
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
        x += 1
    assert x.tolist() == [1] * 8

    for _ in range(3):
        graph.replay()

    assert (x.tolist(), y.tolist()) == ([4] * 8, [7] * 8)


def test_only_the_sizes_of_fake_tensors_are_computed(values: None) -> None:
    with FakeTensorMode():
        made = torch.empty(4, 3, device="cuda") @ torch.empty(3, 2, device="cuda")

    assert (made.shape, made.device.type) == ((4, 2), "cuda")


def test_an_operator_of_operators_computes(values: None) -> None:
    """DTensor draws through one."""
    from torch._prims.rng_prims import run_dtensor_rng_op  # not in each version

    x = torch.zeros(64, device="cuda")

    run_dtensor_rng_op(0, 64, torch.ops.aten.normal_.default, x, 5.0, 0.1)

    assert 4.9 < x.mean().item() < 5.1


def test_an_attention_with_a_choice_of_kernels_has_one(values: None) -> None:
    q = torch.ones(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
    first, second = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION

    with sdpa_kernel([first, second], set_priority=True):
        assert functional.scaled_dot_product_attention(q, q, q).float().mean().item() == 1


def test_threads_compute(values: None) -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append((torch.ones(8, device="cuda") * 3).sum().item()))
    thread.start()
    thread.join()

    assert found == [24.0]


def test_printed_tensors_have_their_values(values: None) -> None:
    assert str(torch.tensor([0.5, 0.0], device="cuda") * 3) == "tensor([1.5000, 0.0000], device='cuda:0')"


AFTER = """
import torch
from tests import simgpu

with simgpu.numerics():
    x = torch.full((), 3.0, device="cuda")
    print(x.item())
print((x + 1).item())
"""


def test_nothing_is_computed_after_the_block() -> None:
    """In a process of its own: memory that an earlier scalar of the host had would read that."""
    assert output(AFTER) == "3.0\n0.0\n"


def test_a_whole_process_computes_where_its_environment_says_so() -> None:
    source = "import torch; print((torch.arange(4, device='cuda') * 2).sum().item())"

    assert output(source, numerics=1) == "12\n"
    assert output(source) == "0\n"


def test_a_kernel_of_triton_is_an_error_that_names_it() -> None:
    done = run(
        """
        import torch

        torch.compile(lambda x: (x * 2).sin() + 1)(torch.ones(64, device="cuda"))
        """,
        numerics=1,
    )

    assert done.returncode == 1
    assert "the kernel triton_" in done.stderr
