"""What scripts send on process groups, alone on gloo and as rank 0 of four."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from instrument.forecast.recorded import step_calls
from instrument.syncs.dryrun.report import DryRunReport
from instrument.syncs.dryrun.run import dry_run_file

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="a build without torch.distributed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
]

SCRIPT = """
import os
import torch
import torch.distributed as dist

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29531")
alone = "WORLD_SIZE" not in os.environ
dist.init_process_group("nccl", rank=0, world_size=int(os.environ.get("WORLD_SIZE", 1)))
x = torch.ones(4, device="cuda")
for _ in range(2):
    {call}
dist.destroy_process_group()
"""


def run(folder: Path, call: str, ranks: int) -> DryRunReport:
    file = folder / "train.py"
    file.write_text(SCRIPT.format(call=call))
    report = dry_run_file(file, None, ranks=ranks)
    assert report.error is None, report.error
    assert report.finished
    assert report.counts is not None
    return report


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    "call",
    [
        "dist.barrier()",
        "dist.reduce(x, 0)",
        "dist.all_reduce(x, async_op=True).wait()",
        "dist.gather(x, [torch.empty_like(x) for _ in range(dist.get_world_size())])",
        "dist.all_gather_object([None] * dist.get_world_size(), {'loss': 1.0})",
        "dist.broadcast_object_list([{'loss': 1.0}], 0)",
    ],
)
def test_what_returns_one_work_or_several_results(tmp_path: Path, call: str, ranks: int) -> None:
    """Operators that return only the work that is awaited, and those that return tensors before it."""
    run(tmp_path, call, ranks)


@pytest.mark.parametrize("call", ["dist.send(x, 1)", "dist.recv(x, 1)", "dist.isend(x, 1).wait()"])
def test_messages_to_another_rank(tmp_path: Path, call: str) -> None:
    """Messages need another rank."""
    run(tmp_path, call, 4)


def test_the_environment_is_restored_if_the_group_cannot_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables of torchrun do not stay if destroy_process_group() raises."""

    def fail() -> None:
        raise RuntimeError("still in use")

    file = tmp_path / "train.py"
    file.write_text("import torch.distributed as dist\ndist.init_process_group('nccl')\n")
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "destroy_process_group", fail)
        with pytest.raises(RuntimeError, match="still in use"):
            dry_run_file(file, None, ranks=4)
    torch.distributed.destroy_process_group()
    assert "WORLD_SIZE" not in os.environ


def test_groups_without_a_description_are_told_apart(tmp_path: Path) -> None:
    """Each collective is as large as its own group, and a group is shown by its description if it has one."""
    make = (
        "groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2]), dist.new_group([0, 3], group_desc='data')]"
    )
    report = run(tmp_path, f"{make}\n    for each in groups: dist.all_reduce(x, group=each)", 4)
    assert report.counts is not None
    step = report.counts.step
    calls = step_calls(step.span, 4)
    assert [call.collective.ranks for call in calls if call.collective] == 2 * [2, 3, 2]
    shown = {each.group: each.count for each in step.collectives}
    assert "undefined" not in shown
    assert shown["data"] == 2


def test_an_unknown_group_has_all_ranks(tmp_path: Path) -> None:
    """A collective whose group is not known is not free."""
    report = run(tmp_path, "dist.all_reduce(x)", 4)
    assert report.counts is not None
    span = report.counts.step.span
    span.record.groups.clear()
    assert {call.collective.ranks for call in step_calls(span, 4) if call.collective} == {4}


SHARDED = """\
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.distributed.init_process_group()
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64))
fully_shard(model)
model.to_empty(device="cuda")
for parameter in model.parameters():
    nn.init.normal_(parameter)
model(torch.randn(4, 64, device="cuda")).sum().backward()
"""


def test_parameters_that_are_filled_after_sharding(tmp_path: Path) -> None:
    """Random numbers for a part of a parameter need no state of the GPU's generator."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    report = dry_run_file(script, None, ranks=4)
    assert report.finished, report.ended
    assert report.numbers["collective_bytes"] > 0
