"""Several GPUs: the values and the time of collectives, and what happens when a rank is missing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import simgpu
from tests.simgpu.programs import environment
from tests.simgpu.ranks import outputs, run_ranks

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim"),
]

MS = 1_000_000

# A tensor's values come from the CPU, as kernels compute nothing.
EACH_COLLECTIVE = """
device = torch.device("cuda", rank)
start(**{"device_id": device} if EAGER else {})

def mine(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).to(device)

def same(name, found, *expected):
    assert found.cpu().tolist() == list(expected), (name, rank, found.cpu(), expected)

ranks = range(world)
x = mine(rank, 10.0 * rank)
dist.all_reduce(x)
same("all_reduce", x, sum(ranks), 10 * sum(ranks))

parts = torch.empty(2 * world).to(device)
dist.all_gather_into_tensor(parts, mine(rank, -rank))
same("all_gather_into_tensor", parts, *(value for one in ranks for value in (one, -one)))

pieces = [torch.empty(one + 1).to(device) for one in ranks]
dist.all_gather(pieces, torch.full((rank + 1,), float(rank)).to(device))
found = torch.cat([piece.cpu() for piece in pieces])
same("all_gather of several sizes", found, *(one for one in ranks for _ in range(one + 1)))

part = torch.empty(2).to(device)
dist.reduce_scatter_tensor(part, mine(*(100 * rank + i for i in range(2 * world))))
same("reduce_scatter_tensor", part, *(100 * sum(ranks) + world * (2 * rank + i) for i in range(2)))

swapped = torch.empty(world).to(device)
dist.all_to_all_single(swapped, mine(*(10 * rank + one for one in ranks)))
same("all_to_all_single", swapped, *(10 * one + rank for one in ranks))

# rank r gives r + 1 values to each
uneven = torch.empty(sum(one + 1 for one in ranks)).to(device)
given = torch.full((world * (rank + 1),), float(rank)).to(device)
dist.all_to_all_single(uneven, given, [one + 1 for one in ranks], [rank + 1] * world)
same("all_to_all_single of several sizes", uneven, *(one for one in ranks for _ in range(one + 1)))

x = mine(rank, 7)
dist.broadcast(x, world - 1)
same("broadcast", x, world - 1, 7)

x = mine(1, rank)
dist.reduce(x, 1)
if rank == 1:
    same("reduce", x, world, sum(ranks))

pieces = [torch.empty(1).to(device) for _ in ranks] if rank == 0 else None
dist.gather(mine(rank * rank), pieces)
if rank == 0:
    same("gather", torch.cat([piece.cpu() for piece in pieces]), *(one * one for one in ranks))

piece = torch.empty(1).to(device)
dist.scatter(piece, [mine(one + 5) for one in ranks] if rank == 0 else None)
same("scatter", piece, rank + 5)

for order in range(3):
    if rank == 0:
        dist.send(mine(order, 1), 1)
    elif rank == 1:
        x = torch.empty(2).to(device)
        dist.recv(x, 0)
        same("recv", x, order, 1)

x = [torch.empty(2).to(device) for _ in range(2)]
before, after = (rank - 1) % world, (rank + 1) % world
works = [dist.P2POp(dist.isend, mine(rank, i), after) for i in range(2)]
works += [dist.P2POp(dist.irecv, x[i], before) for i in range(2)]
for work in dist.batch_isend_irecv(works):
    work.wait()
for i in range(2):
    same("batch_isend_irecv", x[i], before, i)

dist.barrier()
halves = [dist.new_group([one for one in ranks if one % 2 == half]) for half in range(2)]
x = mine(rank + 1)
dist.all_reduce(x, group=halves[rank % 2])
same("new_group", x, sum(one + 1 for one in ranks if one % 2 == rank % 2))

if EAGER:
    group = dist.split_group(split_ranks=[[one for one in ranks if one % 2 == half] for half in range(2)])
    x = mine(rank + 1)
    dist.all_reduce(x, group=group)
    same("split_group", x, sum(one + 1 for one in ranks if one % 2 == rank % 2))

many = [mine(rank), mine(1, 2)]
with dist._coalescing_manager(device=device):
    for x in many:
        dist.all_reduce(x)
same("coalesced", torch.cat([x.cpu() for x in many]), sum(ranks), world, 2 * world)
dist.destroy_process_group()
print("all right")
"""


@pytest.mark.parametrize(("ranks", "eager", "numerics"), [(2, False, 0), (2, True, 1), (4, True, 0)])
def test_each_collective_of_torch_has_the_right_values(ranks: int, eager: bool, numerics: int) -> None:
    source = EACH_COLLECTIVE.replace("EAGER", str(eager))

    assert outputs(source, ranks, numerics=numerics) == ["all right\n"] * ranks


def test_values_that_kernels_computed_are_sent() -> None:
    printed = outputs(
        """
        import torch.distributed._functional_collectives as functional

        start()
        x = torch.arange(4.0, device="cuda") * (rank + 1)
        dist.all_reduce(x)
        y = functional.all_reduce(x + rank, "sum", dist.group.WORLD)
        z = functional.all_gather_tensor(y * 2 + rank, 0, dist.group.WORLD)
        print(x.tolist(), y.tolist(), z.tolist())
        dist.destroy_process_group()
        """,
        2,
        numerics=1,
    )

    expected = [[0.0, 3.0, 6.0, 9.0], [1.0, 7.0, 13.0, 19.0], [2.0, 14.0, 26.0, 38.0, 3.0, 15.0, 27.0, 39.0]]
    assert printed == [" ".join(map(str, expected)) + "\n"] * 2


def test_torchrun_starts_ranks_that_meet(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import os, torch, torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.tensor([1.0, 2.0, 3.0]).cuda()
dist.all_reduce(x)
print(x.cpu().tolist())
dist.destroy_process_group()
"""
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]

    done = subprocess.run(command, env=environment(devices=2), capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2.0, 4.0, 6.0]") == 2


def test_each_type_and_reduction_is_computed_as_on_the_cpu() -> None:
    printed = outputs(
        """
        start()
        values = [torch.tensor([3.0, 2, 0, 1, 5, 7, 2, 3, 4]), torch.tensor([1.0, 5, 2, 2, 6, 1, 2, 2, 8])]
        count = 0
        for name in "float32 float64 float16 bfloat16 int8 uint8 int32 int64".split():
            dtype = getattr(torch, name)
            both = torch.stack([value.to(dtype) for value in values])
            expected = {
                "SUM": both.sum(0).to(dtype), "PRODUCT": both.prod(0).to(dtype),
                "MIN": both.amin(0), "MAX": both.amax(0),
            }
            if dtype.is_floating_point:
                expected["AVG"] = both.double().mean(0).to(dtype)
            for op, result in expected.items():
                x = both[rank].cuda()
                dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
                assert torch.equal(x.cpu(), result), (name, op, x.cpu(), result)
                count += 1
        x = (values[rank] * 1e4).half().cuda()
        dist.all_reduce(x)
        assert x.cpu().tolist()[4:6] == [float("inf"), float("inf")], x.cpu()
        odd = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16()
        x = (odd * (rank + 1)).cuda()
        dist.all_reduce(x)
        assert torch.equal(x.cpu(), (odd.float() + (odd * 2).float()).bfloat16())
        x = torch.tensor([1.0, 2.0]).cuda()
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
        assert x.cpu().tolist() == [1.0, 2.0]
        dist.destroy_process_group()
        print(count)
        """,
        2,
    )

    assert printed == ["36\n"] * 2


def test_each_value_of_the_small_floats_is_summed_and_rounded_as_on_the_cpu() -> None:
    outputs(
        """
        start()
        order = torch.Generator().manual_seed(0)
        for name, bits in ("float16", 16), ("bfloat16", 16), ("float8_e4m3fn", 8), ("float8_e5m2", 8):
            dtype, integer = getattr(torch, name), torch.int16 if bits == 16 else torch.uint8
            values = torch.arange(1 << bits, dtype=torch.int32).to(integer).view(dtype)
            others = values[torch.randperm(1 << bits, generator=order)]
            x = (others if rank else values).cuda()
            dist.all_reduce(x)
            expected = (values.float() + others.float()).to(dtype)
            assert torch.equal(x.cpu().float().nan_to_num(7e7), expected.float().nan_to_num(7e7)), name
        dist.destroy_process_group()
        """,
        2,
    )


def test_a_message_larger_than_the_shared_buffer_goes_in_parts() -> None:
    outputs(
        """
        start()
        size = 1_000_003
        own = torch.arange(size * world, dtype=torch.int32) + rank

        x = own.cuda()
        dist.all_reduce(x)
        assert torch.equal(x.cpu(), own * world + sum(range(world)) - rank * world)

        x = own.cuda()
        dist.reduce_scatter_tensor(x[rank * size : (rank + 1) * size], x)
        expected = (own * world + sum(range(world)) - rank * world)[rank * size : (rank + 1) * size]
        assert torch.equal(x.cpu()[rank * size : (rank + 1) * size], expected)

        all_of_it = torch.empty(size * world * world, dtype=torch.int32).cuda()
        dist.all_gather_into_tensor(all_of_it, own.cuda())
        expected = torch.cat([own - rank + one for one in range(world)])
        assert torch.equal(all_of_it.cpu(), expected)

        x, y = own.cuda(), torch.empty_like(own).cuda()
        works = [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, y, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(works):
            work.wait()
        assert torch.equal(y.cpu(), own - rank + (rank - 1) % world)
        dist.destroy_process_group()
        """,
        3,
    )


WITH_VALUES = """
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

start(device_id=torch.device("cuda", rank))
gloo = dist.new_group(backend="gloo")

def losses(device, wrapped):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(device)
    model = wrapped(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(rank + 1)  # each rank has batches of its own
    for _ in range(8):
        x = torch.randn(16, 32).to(device)
        loss = model(x).sub(x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()

def replicated(model):
    group = groups[next(model.parameters()).device.type]
    return torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.005)

def sharded(model):
    mesh = meshes[next(model.parameters()).device.type]
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)

groups = {"cuda": dist.group.WORLD, "cpu": gloo}
meshes = {kind: DeviceMesh.from_group(group, kind) for kind, group in groups.items()}
for wrapped in (replicated, sharded):
    found, expected = (torch.tensor(list(losses(device, wrapped))) for device in ("cuda", "cpu"))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
    assert found[-1] < found[0] / 2, found
objects = [("from", rank), None]
dist.broadcast_object_list(objects, 1)
gathered = [None] * world
dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (1 + 99 * rank)})
assert gathered == [{"rank": one, "text": "x" * (1 + 99 * one)} for one in range(world)], gathered
dist.destroy_process_group()
print(objects)
"""


def test_with_numerics_a_training_has_the_losses_of_gloo_on_the_cpu() -> None:
    """With DDP and FSDP2; collectives of objects, which read sizes from the GPU, work too."""
    assert outputs(WITH_VALUES, 2, numerics=1) == ["[('from', 1), None]\n"] * 2


def test_with_numerics_a_collective_in_a_graph_is_an_error() -> None:
    done = run_ranks(
        """
        start(device_id=torch.device("cuda", rank))
        x = torch.ones(4).cuda()
        dist.all_reduce(x)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(x)
        """,
        2,
        numerics=1,
    )

    assert all("has no values of c10d.allreduce_.default in a graph" in rank.stderr for rank in done)


MEASURED = """
import json, time
from tests import simgpu

def kernels(entries, part="nccl"):
    found = [entry for entry in entries if entry.kind == "kernel" and part in entry.name]
    return [[one.name.split("(")[0], one.stream, one.start, one.end] for one in found]

def show(entries):
    print(json.dumps(kernels(entries)))

"""


class Kernel(NamedTuple):
    """One kernel of NCCL; times are in ns of CLOCK_REALTIME."""

    name: str
    stream: int
    start: int
    end: int


def measured(source: str, count: int, **settings: object) -> list[list[Kernel]]:
    """Return the kernels that each rank shows at its end."""
    printed = outputs(MEASURED + textwrap.dedent(source), count, **settings)
    return [[Kernel(*kernel) for kernel in json.loads(text.splitlines()[-1])] for text in printed]


def test_a_collective_ends_at_once_on_all_ranks_by_its_size() -> None:
    found = measured(
        """
        start()
        x = torch.ones(1_000_000).cuda()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        with simgpu.log() as entries:
            time.sleep(0.05 * rank)
            for _ in range(3):
                dist.all_reduce(x)
            torch.cuda.synchronize()
        show(entries)
        dist.destroy_process_group()
        """,
        3,
        nccl_ns=20_000,
        nccl_gbs=100,
    )

    for step in range(3):
        starts = [rank[step].start for rank in found]
        ends = [rank[step].end for rank in found]
        assert max(ends) - min(ends) < 5_000  # each rank reads the wall clock for itself
        assert abs(max(ends) - max(starts) - (20_000 + 4_000_000 // 100)) < 5_000


def test_a_straggler_keeps_the_kernel_of_the_others() -> None:
    found = measured(
        """
        start()
        x = torch.ones(1000).cuda()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        with simgpu.log() as entries:
            dist.barrier()
            torch.cuda.synchronize()
            if rank == 1:
                time.sleep(0.2)
            dist.all_reduce(x)
            torch.cuda.synchronize()
        show(entries)
        dist.destroy_process_group()
        """,
        2,
    )

    early, late = (rank[-1] for rank in found)
    assert early.name == "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert 195 * MS < early.end - early.start < 400 * MS
    assert late.end - late.start < MS
    assert abs(early.end - late.end) < 10_000


def test_an_operation_of_the_backward_pass_overlaps_the_all_reduce_of_ddp() -> None:
    printed = outputs(
        MEASURED
        + """
start(device_id=torch.device("cuda", rank))
torch.manual_seed(rank)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).cuda()
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=0.3)
first = [parameter.detach().cpu() for parameter in model.parameters()]
gathered = [torch.empty(256, 256).cuda() for _ in range(world)]
dist.all_gather(gathered, next(model.parameters()).detach())
assert torch.equal(gathered[0].cpu(), gathered[1].cpu())

optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    with simgpu.log() as entries:
        model(torch.randn(32, 256).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
reduces = kernels(entries, "AllReduce")
backward = kernels(entries, "gemm")
overlapping = sum(r[2] < g[3] and g[2] < r[3] for r in reduces for g in backward)
print(len(reduces), len({r[1] for r in reduces} & {g[1] for g in backward}), overlapping > 0)
dist.destroy_process_group()
""",
        2,
        durations="gemm=300000",
        nccl_ns=200_000,
    )

    assert {text.splitlines()[-1] for text in printed} == {"3 0 True"}


def test_fsdp2_gathers_and_scatters_each_block() -> None:
    found = measured(
        """
        from torch.distributed.fsdp import fully_shard

        start(device_id=torch.device("cuda", rank))
        layers = [torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)]
        model = torch.nn.Sequential(*layers).cuda()
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            with simgpu.log() as entries:
                model(torch.randn(2, 16, 64).cuda()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                torch.cuda.synchronize()
        show(entries)
        dist.destroy_process_group()
        """,
        2,
    )

    for rank in found:
        names = [kernel.name.removeprefix("ncclDevKernel_") for kernel in rank]
        assert names.count("ReduceScatter_Sum_f32_RING_LL") == 3
        assert names.count("AllGather_RING_LL") == 6  # in the forward and in the backward pass


def test_a_pipeline_passes_activations_and_gradients() -> None:
    found = measured(
        """
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        class VotesForStatic(PipelineStage):  # the vote is a product, which no kernel computes
            def _warmup_forward_vote(self, *args, **kwargs):
                super()._warmup_forward_vote(*args, **kwargs)
                return torch.tensor([1], dtype=torch.int32, device=self.device)

        start(device_id=torch.device("cuda", rank))
        part = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()).cuda()
        given, made = (torch.empty(2, 32, device="cuda", requires_grad=flag) for flag in (rank > 0, True))
        stage = VotesForStatic(part, rank, world, made.device, input_args=given, output_args=made)
        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).sum())
        for step in range(2):
            with simgpu.log() as entries:
                if rank == 0:
                    schedule.step(torch.randn(8, 32).cuda())
                else:
                    schedule.step(target=torch.randn(8, 32).cuda())
                torch.cuda.synchronize()
        assert part[0].weight.grad is not None
        show(entries)
        dist.destroy_process_group()
        """,
        2,
    )

    assert [[kernel.name for kernel in rank] for rank in found] == [["ncclDevKernel_SendRecv"] * 8] * 2
    for one, other in zip(*found, strict=True):
        assert abs(one.end - other.end) < 10_000


def test_two_communicators_run_at_once() -> None:
    found = measured(
        """
        start()
        one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        x, y = torch.tensor([1.0 + rank]).cuda(), torch.tensor([10.0 + rank]).cuda()
        for group in (one, other):
            dist.all_reduce(torch.ones(1).cuda(), group=group)
        torch.cuda.synchronize()
        with simgpu.log() as entries:
            groups = [(one, x), (other, y)]
            works = [dist.all_reduce(value, group=group, async_op=True) for group, value in groups]
            for work in works:
                work.wait()
            torch.cuda.synchronize()
        assert (x.item(), y.item()) == (3, 21)
        show(entries)
        dist.destroy_process_group()
        """,
        2,
        nccl_ns=20 * MS,
    )

    for first, second in found:
        assert first.stream != second.stream
        assert second.start < first.end


def test_a_graph_replays_its_collectives() -> None:
    found = measured(
        """
        start(device_id=torch.device("cuda", rank))
        x = torch.tensor([1.0 + rank, 5.0]).cuda()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
        x.copy_(torch.tensor([1.0 + rank, 5.0]))
        with simgpu.log() as entries:
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
        assert x.cpu().tolist() == [12, 40], x.cpu()
        show(entries)
        dist.destroy_process_group()
        """,
        2,
    )

    assert [[kernel.name for kernel in rank] for rank in found] == [
        ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"] * 3
    ] * 2


def test_the_traces_of_both_ranks_have_the_kernels_with_their_launches(tmp_path: Path) -> None:
    outputs(
        f"""
        from torch.profiler import profile

        start(device_id=torch.device("cuda", rank))
        x = torch.ones(1000).cuda()
        dist.all_reduce(x)
        with profile() as recording:
            for _ in range(3):
                dist.all_reduce(x)
            dist.broadcast(x, 0)
            torch.cuda.synchronize()
        recording.export_chrome_trace(os.path.join({str(tmp_path)!r}, f"{{rank}}.json"))
        dist.destroy_process_group()
        """,
        2,
    )

    for rank in range(2):
        trace = json.loads((tmp_path / f"{rank}.json").read_text())
        events: list[dict[str, Any]] = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        kernels = [event for event in events if event["cat"] == "kernel" and "nccl" in event["name"]]
        launches = {e["args"]["correlation"] for e in events if e["name"] == "cudaLaunchKernelExC"}
        assert trace["distributedInfo"]["rank"] == rank
        assert sum("AllReduce_Sum_f32_RING_LL" in kernel["name"] for kernel in kernels) == 3
        assert sum("Broadcast_RING_LL" in kernel["name"] for kernel in kernels) == 1
        assert {kernel["args"]["correlation"] for kernel in kernels} <= launches
        assert {kernel["args"]["Collective name"] for kernel in kernels} == {"allreduce", "broadcast"}
        assert sum(event["name"] == "record_param_comms" for event in events) == 4


ALONE = """
from datetime import timedelta

start(timeout=timedelta(seconds=3))
x = torch.ones(1000).cuda()
dist.all_reduce(x)
torch.cuda.synchronize()
if rank == 1:
    LEAVES
else:
    dist.all_reduce(x)
    torch.cuda.synchronize()
    print("passed")
"""


@pytest.mark.parametrize(
    ("leaves", "ends_with"),
    [("import time; time.sleep(8); os._exit(0)", 0), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)],
)
def test_the_watchdog_ends_a_rank_whose_peer_is_missing(leaves: str, ends_with: int) -> None:
    before = time.monotonic()
    alone, peer = run_ranks(ALONE.replace("LEAVES", leaves), 2)
    passed = time.monotonic() - before

    assert peer.returncode == ends_with
    assert alone.returncode == -signal.SIGABRT
    assert "passed" not in alone.stdout
    assert "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE" in alone.stderr
    assert passed < 60


def test_an_abort_ends_the_kernel_of_a_rank_that_is_alone() -> None:
    alone, _ = outputs(
        """
        import sys, time

        start(device_id=torch.device("cuda", rank))
        x = torch.ones(1000).cuda()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            time.sleep(0.5)
            waited = [work.is_completed()]
            dist.distributed_c10d._abort_process_group()
            torch.cuda.synchronize()
            print(waited)
        sys.stdout.flush()
        os._exit(0)
        """,
        2,
    )

    assert alone == "[False]\n"


def test_ranks_that_differ_in_size_wait_for_ever() -> None:
    (one, other) = run_ranks(
        ALONE.replace("LEAVES", "dist.all_reduce(x[:10]); torch.cuda.synchronize()"), 2, verbose=1
    )

    assert [one.returncode, other.returncode] == [-signal.SIGABRT] * 2
    assert "do not match" in one.stderr + other.stderr


def test_a_communicator_without_all_its_ranks_is_a_system_error() -> None:
    done = run_ranks(
        """
        import time

        start()
        if rank == 0:
            dist.all_reduce(torch.ones(1).cuda())
        else:
            time.sleep(6)
        """,
        2,
        nccl_init_ns=1_000 * MS,
    )

    assert "ncclSystemError" in done[0].stderr
    assert "1 of 2 ranks have checked in" in done[0].stderr


def test_nothing_is_left_in_shared_memory_and_leftovers_are_removed() -> None:
    def names() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("simgpu-nccl-*")}

    before = names()
    leftover = Path("/dev/shm/simgpu-nccl-0123456789abcdef0123456789abcdef")
    leftover.write_text("")

    outputs("start(); dist.barrier(); dist.destroy_process_group()", 2)

    assert not leftover.exists()
    assert names() <= before
