"""The steps that `instrument run` counts, and the windows that it records."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from instrument.base.run_folder import entries_of
from instrument.read.jobs.read import read_trace
from tests.bootstrap.programs import RUN, TRAIN, entries_in, write
from tests.bootstrap.programs import run_warm as run

pytestmark = pytest.mark.process

FORWARD = """
import torch
model = torch.nn.Linear(2, 2)
for _ in range(110):
    model(torch.ones(1, 2))
"""


@pytest.mark.parametrize(
    ("program", "steps", "untimed", "around"),
    [
        (TRAIN, "2", [0, 0], [[1, 1], [3, 4]]),
        (TRAIN, "0", None, [[1, 4]]),  # step 0 begins where its recording begins
        (FORWARD, "104", [0, 100], [[101, 103], [105, 109]]),  # 100 calls may belong to one step
    ],
)
def test_untimed_steps(
    tmp_path: Path, program: str, steps: str, untimed: list[int] | None, around: list[list[int]]
) -> None:
    """Steps with an unknown start are not timed, which the summary says, but count as steps of the run."""
    write(tmp_path, program)
    done = run(tmp_path, [*RUN, "--steps", steps, "--", "train.py"])
    (entry,) = entries_in(tmp_path / "runs/instrument")
    timing = entry["timing"]
    assert (untimed, around) == (timing["untimed_steps"], timing["around_steps"])
    assert (110 if program == FORWARD else 5) == timing["run_steps"]
    expected = [] if untimed is None else ["step 0" if untimed == [0, 0] else "steps 0-100"]
    text = " ".join(done.stderr.split())
    assert expected == re.findall(r"\(not counting (steps? [\d-]+), whose start is unknown\)", text)


HAND = """
for parameter in model.parameters():
        with torch.no_grad():
            parameter -= parameter.grad
"""


@pytest.mark.parametrize("update", ["optimizer.step()", HAND.strip()])
def test_windows_of_the_program_take_precedence(tmp_path: Path, update: str) -> None:
    """If the program records steps itself, its own windows are recorded; a message names the ignored options."""
    text = TRAIN.replace("range(5)", "instrument.steps(range(5), 'own', at='1-3')").replace(
        "optimizer.step()", update
    )
    write(tmp_path, "import instrument\n" + text)
    done = run(tmp_path, [*RUN, "--steps", "1-3", "--out", "other", "--", "train.py"])
    assert done.returncode == 0
    (entry,) = entries_in(tmp_path / "own")
    assert entry["status"] == "recorded"
    messages = [line for line in done.stderr.splitlines() if line.startswith("instrument:")]
    ignored = "instrument: the program records windows of its own, so these are ignored: --steps 1-3 --out other"
    assert messages == [ignored]
    assert not (tmp_path / "other").exists()
    assert "are ignored" not in run(tmp_path, [*RUN, "--", "train.py"]).stderr


def test_validation_belongs_to_the_next_step(tmp_path: Path) -> None:
    """Validation after an update is part of the next step, under `run` and in `instrument.steps`."""
    text = TRAIN.replace(
        "optimizer.step()", "optimizer.step()\n    with instrument.annotate(f'validate {_}'): pass"
    )
    write(tmp_path, "import instrument\n" + text, "plain.py")
    write(
        tmp_path,
        "import instrument\n" + text.replace("range(5)", "instrument.steps(range(5), 'own', at=3)"),
        "own.py",
    )
    run(tmp_path, [sys.executable, "own.py"])
    run(tmp_path, [*RUN, "--steps", "3", "--out", "run", "--", "plain.py"])
    for folder in ("own", "run"):
        (path,) = (tmp_path / folder).glob("window-0001/*.json.gz")
        names = list(read_trace(path).regions.text("name"))
        assert [name for name in names if name.startswith("validate")] == ["validate 2"]


def test_adjacent_windows_in_the_backward(tmp_path: Path) -> None:
    """If optimizers step in the backward pass, windows may follow each other without a gap."""
    write(
        tmp_path,
        """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
optimizers = {parameter: torch.optim.SGD([parameter], 0.01) for parameter in model.parameters()}
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
for _ in range(8):
    model(torch.randn(3, 4)).square().mean().backward()
""",
    )
    windows = ["--wait", "0", "--warmup", "0", "--active", "1", "--repeat", "5"]
    assert run(tmp_path, [*RUN, *windows, "--", "train.py"]).returncode == 0
    entries = entries_in(tmp_path / "runs/instrument")
    assert [entry["steps"] for entry in entries] == [[step, step] for step in range(5)]


def test_unhashable_optimizers(tmp_path: Path) -> None:
    """An optimizer that cannot be hashed works, and its steps count."""
    write(
        tmp_path,
        TRAIN.replace("torch.optim.SGD", "Odd").replace(
            "import torch",
            "import torch\nclass Odd(torch.optim.SGD):\n    __eq__ = None\n    __hash__ = None",
        ),
    )
    done = run(tmp_path, [*RUN, "--steps", "2", "--", "train.py"])
    assert done.returncode == 0
    assert "Where the step went" in done.stderr


MODEL = "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())\n"
BY_HAND = f"""{MODEL}
def train_step(number):
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    model.zero_grad()
for number in range(6):
    train_step(number)
"""


EVALUATION = f"""{MODEL}
with torch.no_grad():
    for _ in range(6):
        model(torch.ones(1, 2))
"""


LBFGS = f"""{MODEL}
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    return loss
for _ in range(6):
    optimizer.step(closure)
"""


LATE = f"""{MODEL}
optimizer = None
for number in range(12):
    model(torch.ones(1, 2)).sum().backward()
    if number % 2:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("program", "options", "last", "message"),
    [
        (BY_HAND, [], 6, "each backward pass counts as a step"),
        (EVALUATION, [], 6, "each call of Sequential counts as a step"),
        (LBFGS, [], 6, None),
        (LATE, [], 6, "each backward pass counts as a step"),
        (TRAIN.replace("range(5)", "range(6)"), ["--step-on", "forward"], 6, None),
        (LATE, ["--step-on", "backward"], 12, None),
        (BY_HAND, ["--step-on", "train.py:train_step"], 6, None),
    ],
)
def test_sign_of_a_step(tmp_path: Path, program: str, options: list[str], last: int, message: str | None) -> None:
    """The best available sign ends a step, which is logged unless it is an optimizer or given by the user."""
    write(tmp_path, program)
    done = run(tmp_path, [*RUN, "--steps", "3,1000", *options, "--", "train.py"])
    assert done.returncode == 0, done.stderr
    assert message is None or message in done.stderr
    assert (message is None) == ("--step-on" not in done.stderr)
    recorded, missed = entries_in(tmp_path / "runs/instrument")[-2:]
    assert (recorded["status"], recorded["steps"]) == ("recorded", [3, 3])
    assert missed["reason"] == f"the loop ended before step {last}"
    assert "Sequential" in done.stderr or "Linear" in done.stderr


@pytest.mark.parametrize("program", [TRAIN, BY_HAND, EVALUATION])
def test_step_0(tmp_path: Path, program: str) -> None:
    """Step 0 is recorded on request, with the regions of the model."""
    write(tmp_path, program)
    done = run(tmp_path, [*RUN, "--steps", "0", "--", "train.py"])
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert (entry["status"], entry["steps"]) == ("recorded", [0, 0])
    assert "Linear" in done.stderr


GRADIENTS = f"""{MODEL}
parameters = list(model.parameters())
for number in range(6):
    gradients = torch.autograd.grad(model(torch.ones(1, 2)).sum(), parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter -= gradient
"""
FUNCTIONAL = """
import torch
weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for number in range(6):
    (weight.grad,) = torch.autograd.grad(weight.square().sum(), weight)
    optimizer.step()
"""
WITHOUT_TORCH_OPTIMIZER = """
import torch
weight = torch.ones(2, requires_grad=True)
for number in range(6):
    loss = weight.square().sum()
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum() + loss, [weight])
    with torch.no_grad():
        weight -= 0.01 * second
"""


@pytest.mark.parametrize("program", [GRADIENTS, FUNCTIONAL, WITHOUT_TORCH_OPTIMIZER])
@pytest.mark.parametrize("steps", ["0", "2"])
def test_loops_that_compute_gradients_without_backward(tmp_path: Path, program: str, steps: str) -> None:
    """A call of `torch.autograd.grad` begins step 0, and without an optimizer ends each step."""
    write(tmp_path, program)
    done = run(tmp_path, [*RUN, "--steps", steps, "--", "train.py"])
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert ("recorded", [int(steps)] * 2) == (entry["status"], entry["steps"]), done.stderr
    assert 6 == entry["timing"]["run_steps"]
    said = "no optimizer step and no backward() was seen, so each call of torch.autograd.grad counts as a step"
    assert (program is not FUNCTIONAL) == (said in " ".join(done.stderr.split()))


def test_gradients_beside_a_backward_pass(tmp_path: Path) -> None:
    """Passes of `backward()` are the stronger sign: gradients for a penalty or a plot end no step."""
    gradients = "torch.autograd.grad(model(torch.ones(1, 2)).sum(), [*model.parameters()])"
    program = BY_HAND.replace("    model(", f"    {gradients}\n    model(")
    write(tmp_path, program)
    run(tmp_path, [*RUN, "--steps", "3", "--", "train.py"])
    (entry,) = [entry for entry in entries_in(tmp_path / "runs/instrument") if entry["status"] == "recorded"]
    assert ([3, 3], 6) == (entry["steps"], entry["timing"]["run_steps"])


ACTOR_CRITIC = f"""{MODEL}
critic = torch.nn.Linear(2, 1)
optimizers = [torch.optim.SGD(network.parameters(), 0.1) for network in (critic, model)]
for number in range(9):
    for network, optimizer in list(zip((critic, model), optimizers))[: 1 + (number > 2)]:
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


SEARCHES = """
import gc, torch
searches = []
def counted(search):
    def call(*given):
        if torch.autograd._profiler_enabled():
            searches.append(1)
        return search(*given)
    return call
gc.get_objects, gc.get_referrers = counted(gc.get_objects), counted(gc.get_referrers)
"""


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (ACTOR_CRITIC, []),
        (LATE.replace("optimizer = None", "optimizer = torch.optim.SGD(model.parameters(), 0.1)"),
         ["--step-on", "backward", "--steps", "0-4"]),
        (TRAIN, ["--steps", "0"]),
        (EVALUATION, ["--steps", "all"]),
    ],
)  # fmt: skip
def test_no_search_inside_a_window(tmp_path: Path, program: str, options: list[str]) -> None:
    """The objects of the process are searched before a window opens, not inside it."""
    write(tmp_path, f"{SEARCHES}{program}\nprint(len(searches))")
    done = run(tmp_path, [*RUN, *options, "--", "train.py"])
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert "recorded" == entry["status"]
    assert "0\n" == done.stdout
    assert "Linear" in done.stderr


@pytest.mark.parametrize(("steps", "inside"), [("2-6", False), ("0", True)])
def test_optimizer_created_in_a_window(tmp_path: Path, steps: str, inside: bool) -> None:
    """The optimizer's model is searched between two steps, or in step 0 if that is recorded, which is logged."""
    program = f"""{MODEL}
def train(network, count):
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(count):
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()
if {inside}:
    model(torch.ones(1, 2))
else:
    train(model, 4)
train(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(2, 1)), 5)
"""
    write(tmp_path, program)
    done = run(tmp_path, [*RUN, "--steps", steps, "--", "train.py"])
    (entry,) = entries_in(tmp_path / "runs/instrument")
    assert entry["timing"]["own_ns"] > 0
    assert "While recording, the library itself worked for" in done.stderr
    trace = read_trace(tmp_path / "runs/instrument" / entry["files"][0]["path"])
    names = list(trace.regions.text("name"))
    assert "Tanh" in names
    own = [row for row, name in enumerate(names) if name == "instrument (own work)"]
    assert own
    for row in own:
        start, end = trace.regions.start_ns[row], trace.regions.end_ns[row]
        assert any((trace.steps.start_ns < end) & (start < trace.steps.end_ns)) == inside


@pytest.mark.parametrize(
    ("steps", "entries"),
    [
        ([], [("recorded", [103, 105])]),
        (["--steps", "0,2-4,103"], [("skipped", [0, 0]), ("not reached", None), ("recorded", [103, 103])]),
    ],
)
def test_steps_before_their_sign_was_known(tmp_path: Path, steps: list[str], entries: list[Any]) -> None:
    """Calls that ended before they were known to be steps are not recorded."""
    write(tmp_path, f"{MODEL}for _ in range(110):\n    model(torch.ones(1, 2))\n")
    done = run(tmp_path, [*RUN, *steps, "--", "train.py"])
    unseen = "steps up to 100 passed before it was known what a step is"
    assert unseen in done.stderr
    assert 1 == done.stderr.count("use --step-on to choose something else")
    found = entries_in(tmp_path / "runs/instrument")
    assert [(entry["status"], entry["steps"]) for entry in found] == entries
    assert {entry["reason"] for entry in found if entry["status"] != "recorded"} <= {unseen}
    assert "Linear" in done.stderr.split("Where the step went")[1]


@pytest.mark.parametrize(
    ("end", "status", "steps"),
    [
        ("", "partial", None),
        ("1 / 0", "partial", [5, 5]),
        ("import signal; signal.raise_signal(signal.SIGTERM)", "partial", [5, 5]),
    ],
)
def test_step_after_the_last_update(tmp_path: Path, end: str, status: str, steps: list[int] | None) -> None:
    """A step that an error or a signal ends is cut short; one at the program's normal end never ran."""
    write(tmp_path, f"{TRAIN}\n{end}\n")
    done = run(tmp_path, [*RUN, "--steps", "2,5", "--", "train.py"])
    found = entries_in(tmp_path / "runs/instrument")
    assert [(entry["status"], entry["steps"]) for entry in found] == [("recorded", [2, 2]), (status, steps)]
    assert [None, steps and 5] == [entry["cut_step"] for entry in found]
    assert bool(steps) == ("(step 2; step 5 was cut short)" in done.stderr)
    if "/" in end:
        assert found[-1]["reason"] == "the loop ended in step 5: ZeroDivisionError: division by zero"
    if steps is None:
        assert found[-1]["reason"] == "the loop ended before step 5"
        assert "Recorded: 1 of the first 5 steps" in done.stderr
        assert "window-0002" not in done.stderr


@pytest.mark.parametrize("wrong", ["nothing", "no.py:step", "train:a b"])
def test_wrong_step_on(tmp_path: Path, wrong: str) -> None:
    """A wrong `--step-on` is reported at once."""
    done = run(tmp_path, [*RUN, "--step-on", wrong, "--", "train.py"])
    assert (done.returncode, wrong.partition(":")[0] in done.stderr) == (2, True)


def test_missing_step_function(tmp_path: Path) -> None:
    """At the end, a message says that nothing was recorded, and why."""
    write(tmp_path, TRAIN)
    done = run(tmp_path, [*RUN, "--step-on", "train.py:nothing", "--", "train.py"])
    assert "was not found, or never called" in done.stderr


def test_a_program_that_fails_before_its_first_step(tmp_path: Path) -> None:
    """The message names its error, and gives no advice on steps."""
    write(tmp_path, "import torch\nraise KeyError('data')\n")
    done = run(tmp_path, [*RUN, "--", "train.py"])
    said = "nothing was recorded: the program ended with KeyError before its first step\n"
    assert (1, True) == (done.returncode, done.stderr.endswith(said))


@pytest.mark.parametrize("killed", [True, False])
def test_a_process_that_is_killed_in_its_window(tmp_path: Path, killed: bool) -> None:
    """The launcher of a rank, which has no steps itself, does not say that nothing was recorded."""
    child = TRAIN.replace("    model(", "    if _ == 3: import os; os.kill(os.getpid(), 9)\n    model(")
    (tmp_path / "child.py").write_text(child if killed else "print(1)")
    write(tmp_path, "import subprocess, sys, torch\nsubprocess.run([sys.executable, 'child.py'])")
    done = run(tmp_path, [*RUN, "--steps", "2-4", "--", "train.py"])
    assert killed == ("nothing was recorded" not in done.stderr)
    assert ["failed"] * killed == [entry["status"] for entry in entries_of(tmp_path / "runs/instrument")]


def test_annotated_backward(tmp_path: Path) -> None:
    """Code annotated as "backward" has that region once."""
    text = TRAIN.replace("    model(", "    with instrument.annotate('backward'): model(")
    write(tmp_path, f"import instrument\n{text}")
    done = run(tmp_path, [*RUN, "--steps", "2", "--", "train.py"])
    assert len(re.findall(r"^ *backward +", done.stderr, re.MULTILINE)) == 1
