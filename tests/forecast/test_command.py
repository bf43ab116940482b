"""`instrument forecast`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from instrument.forecast.gpus import GPUS
from instrument.forecast.table import write_table
from instrument.start.cli import app
from instrument.syncs.counting.memory_use import replayed
from instrument.syncs.dryrun.run import dry_run_file

from .tables import content

SCRIPT = """
import sys
import torch
print("training")
model = torch.nn.Linear(int(sys.argv[1]), 512).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.zeros(64, int(sys.argv[1]), device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["forecast", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


def test_gpus_side_by_side(script: Path) -> None:
    """A row for each GPU, in the order asked for, after what the script prints."""
    code, out, _ = run("--gpu", "h100,t4", "--", script, 512)
    assert code == 0
    shown = out[out.index("gpu ") :].splitlines()
    assert [line.split()[0] for line in shown[1:3]] == ["h100", "t4"]


def test_json(script: Path) -> None:
    """The same as JSON; a larger model takes longer."""
    found = [json.loads(run("--json", "--gpu", "l4", "--", script, width)[1])[0] for width in (512, 65536)]
    assert [each["gpu"] for each in found] == ["l4", "l4"]
    assert found[0]["gpu_ns"] < found[1]["gpu_ns"]
    assert found[0]["least_ns"] <= found[0]["ns"] <= found[0]["most_ns"]
    assert found[0]["peak_bytes"] < found[1]["peak_bytes"] < found[0]["memory_bytes"]
    assert found[0]["fits"]


def test_a_model_that_does_not_fit(script: Path) -> None:
    """The peak of its memory is beside that of each GPU."""
    script.write_text(SCRIPT.replace("512).cuda()", "4_000_000).cuda()"))
    _, out, _ = run("--gpu", "t4,h100", "--", script, 1024)
    small, large = out[out.index("gpu ") :].splitlines()[1:3]
    assert small.endswith("of 15.6 GB: too much")
    assert large.endswith("of 84.9 GB")


def test_table(script: Path, tmp_path: Path) -> None:
    """Another table is used instead: one without this GPU gives a bound."""
    file = tmp_path / "table.json.gz"
    write_table(content("a100"), file)
    code, out, _ = run("--table", file, "--gpu", "l4", "--", script, 512)
    assert code == 0
    assert "bound, not forecast" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "p100", "train.py"), "--gpu must be one of h100"),
        (("nothing.py",), "there is no file nothing.py"),
        (("--gpus", "9", "train.py"), "--gpus must be 1 to 8, those of one machine: 9"),
        (("--gpus", "4", "--parallel", "tp", "train.py"), "--parallel must be one of dp, fsdp: 'tp'"),
        (("--parallel", "dp", "train.py"), "--parallel dp needs --gpus of at least 2: 1"),
        (("--batch", "--lr", "--", "train.py", "--lr", "0.1"), "a whole number of at least 1: --lr has '0.1'"),
    ],
)
def test_wrong_arguments(words: tuple[str, ...], message: str) -> None:
    """They end the command with code 2 and a message."""
    code, _, err = run(*words)
    assert code == 2
    assert message in err


BATCHES = """
import sys
import torch
from torch import nn
batch = int(sys.argv[-1].rpartition("=")[2])
print("batch", batch)
model = nn.Sequential(nn.Linear(1000, 3000), nn.GELU(), nn.LayerNorm(3000), nn.Linear(3000, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.zeros(batch * 1000, 1000, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    file = tmp_path / "batches.py"
    file.write_text(BATCHES)
    return file


@pytest.mark.parametrize(
    ("option", "words"),
    [("batch-size", ("--batch-size", "4")), ("--batch_size", ("--batch_size=4",)), ("--batch_size=", ("8",))],
)
def test_the_largest_batch(batches: Path, option: str, words: tuple[str, ...]) -> None:
    """It fits into the memory of each GPU, and one more would not."""
    code, out, _ = run("--json", "--gpu", "t4,l4", "--batch", option, "--", batches, *words)
    assert code == 0
    for each in json.loads(out):
        fits = []
        for batch in (each["largest_batch"], each["largest_batch"] + 1):
            report = dry_run_file(batches, None, fake=True, args=[str(batch)], steps=2)
            assert report.allocations is not None
            fits.append(replayed(report.allocations, GPUS[each["gpu"]].torch_bytes) is not None)
        assert fits == [True, False]


def test_the_largest_batch_is_the_same_in_any_order(batches: Path) -> None:
    """What is assumed of the memory at the peak depends on the batch that runs, not on what ran before."""
    found = []
    for names in ("t4,h100", "h100,t4"):
        words = ("--json", "--gpu", names, "--gpus", 4, "--parallel", "fsdp", "--batch", "--batch-size")
        _, out, _ = run(*words, "--", batches, "--batch-size", 1)
        found.append({each["gpu"]: each["largest_batch"] for each in json.loads(out)})
    assert found[0] == found[1]
    assert all(found[0].values())


def test_few_runs(batches: Path) -> None:
    """The forecast, two batches and the two at the edge, with two more where it is far; they print once."""
    batches.write_text(BATCHES.replace("print(", "sys.stderr.write('run ')\nprint("))
    _, out, err = run("--gpu", "t4", "--batch", "--batch-size", "--", batches, "--batch-size", 4)
    assert 4 <= err.count("run ") <= 7
    assert out.splitlines()[0] == "batch 4"
    assert out.splitlines()[1].endswith("batch")


def test_a_model_that_fits_with_no_batch(batches: Path) -> None:
    """The largest batch is 0."""
    batches.write_text(BATCHES.replace("3000", "1_000_000"))
    _, out, _ = run("--json", "--gpu", "t4", "--batch", "--batch-size", "--", batches, "--batch-size", 4)
    assert json.loads(out)[0]["largest_batch"] == 0


def test_a_script_that_fails_with_another_batch(batches: Path) -> None:
    """The error is named with the batch."""
    batches.write_text(BATCHES.replace("print(", "assert batch == 4\nprint("))
    code, _, err = run("--batch", "--batch-size", "--", batches, "--batch-size", 4)
    assert code == 2
    assert "with a batch of 8 the script ended with AssertionError" in err


@pytest.mark.parametrize("parallel", ["dp", "fsdp"])
def test_a_script_for_one_gpu_on_several(batches: Path, parallel: str) -> None:
    """It says what was assumed; gradients are in buckets, too, and shares take less memory."""
    one = json.loads(run("--json", "--gpu", "t4", "--", batches, 4)[1])[0]
    words = ("--json", "--gpu", "t4", "--gpus", 4, "--parallel", parallel, "--", batches, 4)
    four = json.loads(run(*words)[1])[0]
    assert four["communication_ns"] >= four["exposed_ns"] > 0
    assert four["assumed"].startswith("assumed: ")
    assert (one["assumed"], one["communication_ns"]) == ("", 0)
    assert (four["peak_bytes"] > one["peak_bytes"]) == (parallel == "dp")


def test_a_script_for_one_gpu_needs_to_be_told(batches: Path) -> None:
    """What it does on several is not guessed."""
    code, _, err = run("--gpus", 4, "--", batches, 4)
    assert code == 2
    assert "the step has no collectives: --gpus 4 needs --parallel, which must be one of dp, fsdp" in err


def test_a_script_that_exchanges_data_needs_no_assumption(tmp_path: Path) -> None:
    """What the script does itself is not done once more."""
    file = tmp_path / "train.py"
    file.write_text(
        "import torch\n"
        "torch.distributed.init_process_group('nccl')\n"
        "model = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(3):\n"
        "    model(torch.zeros(4, 8, device='cuda')).sum().backward()\n"
        "    torch.distributed.all_reduce(model.weight.grad)\n"
        "    optimizer.step()\n"
    )
    code, _, err = run("--gpu", "t4", "--gpus", 4, "--parallel", "dp", "--", file)
    assert code == 2
    assert "the script exchanges data itself: leave out --parallel" in err
    assert run("--gpu", "t4", "--gpus", 4, "--", file)[0] == 0


def test_a_script_that_fails(tmp_path: Path) -> None:
    """The error is named, and the exit code is 1."""
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('no data')")
    code, _, err = run(file)
    assert code == 1
    assert "RuntimeError: no data" in err
