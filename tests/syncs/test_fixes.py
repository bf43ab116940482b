"""Suggested fixes do not synchronize, and the code that they replace does."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch

import instrument
from instrument.base.findings import Fix, Site, SyncFinding
from instrument.explain.waits import fixes, operations
from instrument.explain.waits.events import SyncEvent
from instrument.explain.waits.fixes import fix_of
from instrument.explain.waits.report import SyncReport
from instrument.syncs import monitor
from tests.support.torch_versions import copies_numbers

from .reports import findings_of


def fixes_with_code() -> list[Fix]:
    """Return every suggestion that has code."""
    values = [*vars(fixes).values(), *vars(operations).values(), *(row.fix for row in operations.OPERATIONS)]
    return list(dict.fromkeys(fix for fix in values if isinstance(fix, Fix) and fix.before))


def variables() -> dict[str, Any]:
    """Return the variables that the suggested code uses, as in a training script."""
    gpu = torch.device("cuda")
    x = torch.rand(4, device=gpu)
    model = torch.nn.Linear(4, 1).to(gpu)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    loss = model(x).sum()
    scaler.scale(loss).backward()
    return {
        "torch": torch,
        "x": x,
        "y": x.clone(),
        "a": torch.eye(4, device=gpu),
        "n": torch.tensor(2, device=gpu),
        "scale": torch.tensor(2.0, device=gpu),
        "limit": torch.tensor(10.0, device=gpu),
        "mask": x > 0,
        "labels": torch.tensor([0, 1, 1, 2], device=gpu),
        "repeats": torch.tensor([4, 4, 4, 4], device=gpu),
        "batch": torch.rand(20_000),
        "buffer": torch.empty(20_000, device=gpu),
        "rows": torch.rand(200, 200, pin_memory=True),
        "host": torch.empty(4),
        "path": "/dev/null",
        "loss": loss.detach(),
        "losses": [],
        "total": torch.zeros((), device=gpu),
        "right": torch.zeros((), device=gpu, dtype=torch.long),
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
        "done": torch.cuda.Event(),
        "side": torch.cuda.Stream(),
    }


def dry_run_of(code: str) -> SyncReport:
    """Return the report of a dry run of ``code``; its set-up is allowed to synchronize."""

    def step() -> None:
        with instrument.allow_sync("set up"):
            names = variables()
        linecache.cache["suggestion.py"] = (len(code), None, code.splitlines(keepends=True), "suggestion.py")
        exec(compile(code, "suggestion.py", "exec"), names)

    return instrument.dry_run(step)


@pytest.mark.parametrize("fix", fixes_with_code(), ids=lambda fix: fix.before.splitlines()[-1])
def test_fix_removes_the_synchronization(fix: Fix, capsys: pytest.CaptureFixture[str]) -> None:
    """The old code synchronizes and gets this suggestion; the suggested code does not synchronize."""
    torch.distributions.Distribution.set_default_validate_args(True)  # torch's default until something is compiled
    before = dry_run_of(fix.before)
    assert before.error is None, before
    if fix.before in ("x[0] = 1.0", "x[labels] = 1.0") and not copies_numbers:
        assert [] == before.syncs, before
    else:
        assert fix in [fix_of(found) for found in before.syncs], before
    after = dry_run_of(fix.after)
    assert after.error is None, after
    assert [] == after.syncs, after
    assert [] == after.not_covered


@pytest.mark.parametrize("fix", fixes_with_code(), ids=lambda fix: fix.before.splitlines()[-1])
def test_fixes_are_short(fix: Fix) -> None:
    """A suggestion is at most two sentences and a few lines."""
    assert len(fix.text) <= 200
    assert len(fix.before.splitlines()) <= 1
    assert len(fix.after.splitlines()) <= 3


def finding(op: str, **more: Any) -> SyncFinding:
    return findings_of(SyncEvent(op, more.pop("cause", ""), Site("/x/train.py", 1, "step"), **more))[0]


def test_fix_for_an_unknown_operation() -> None:
    """An operation that is not in the table gets a suggestion by its direction."""
    assert "pin" in fix_of(finding("new_operation", direction="H2D")).text
    assert "event" in fix_of(finding("new_operation", direction="D2H")).text
    assert "allow_sync" in fix_of(finding("new_operation")).text


def test_fix_depends_on_the_library_line() -> None:
    """The value that a GradScaler reads gets the scaler's suggestion, not the one for `item`."""
    via = Site("/v/lib/python3.11/site-packages/torch/amp/grad_scaler.py", 300, "GradScaler._maybe_opt_step")
    assert "fused" in fix_of(finding("item", via=via)).text
    windows = Site("C:\\v\\site-packages\\torch\\amp\\grad_scaler.py", 300, "GradScaler.step")
    assert "fused" in fix_of(finding("item", via=windows)).text
    own = Site("/home/mytorch/amp/grad_scaler.py", 300, "step")
    assert "fused" not in fix_of(finding("item", via=own)).text
    file = "/v/lib/python3.11/site-packages/torch/serialization.py"
    assert "thread" in fix_of(finding("cpu", via=Site(file, 900, "_save"))).text
    assert "before the loop" in fix_of(finding("load", via=Site(file, 1900, "_load.<locals>.restore"))).text


@pytest.mark.parametrize(
    ("op", "cause", "word"),
    [
        ("to", monitor.PAGEABLE, "non_blocking=True blocks"),
        ("to", "waits for the work of a stream", "DataLoader"),
        ("synchronize", "cudaEventSynchronize", "Let the GPU wait"),
        ("synchronize", "cudaStreamSynchronize", "other stream"),
        ("synchronize", "hipDeviceSynchronize", "Leave it out"),
    ],
)
def test_fix_depends_on_the_cause(op: str, cause: str, word: str) -> None:
    """Causes from live detection and from traces lead to the same suggestions as those from a dry run."""
    assert word in fix_of(finding(op, cause=cause, direction="H2D" if op == "to" else None)).text


GPU_LINE = Site("/v/site-packages/transformers/masking_utils.py", 776, "create")


@pytest.mark.parametrize(
    ("op", "code", "more", "word"),
    [
        ("to", "x = batch.to(device)", {"cause": "copies to the GPU from pinned memory, blocking"}, "only non_bl"),
        ("to", "noise = torch.zeros(4, 1).to(device)", {"cause": "copies to the GPU"}, "Create it on the GPU"),
        ("cuda", "noise = torch.randn(4).cuda()", {"cause": "copies to the GPU"}, "Create it on the GPU"),
        ("to", "x = rows(torch.zeros(4)).to(device)", {"cause": "copies to the GPU"}, "DataLoader"),
        ("bool", "if torch.isnan(loss): raise ValueError", {}, "only every so many steps"),
        ("bool", "if not x.isfinite().all():", {}, "only every so many steps"),
        ("bool", "if loss > 10:", {}, "torch.where"),
        ("bool", "out = model(**batch)", {"via": GPU_LINE}, "A line of a library synchronizes"),
        (
            "setitem",
            "nn.init.dirac_(w)",
            {"via": Site("/v/site-packages/torch/nn/init.py", 441, "dirac_")},
            "once",
        ),
        ("setitem", "loss.backward()", {"backward": "IndexBackward0"}, "how many elements are chosen"),
    ],
)
def test_fix_depends_on_the_line(
    monkeypatch: pytest.MonkeyPatch, op: str, code: str, more: dict[str, Any], word: str
) -> None:
    """The code of the line, and whether it belongs to a library, select the suggestion."""
    monkeypatch.setitem(linecache.cache, "/x/train.py", (len(code), None, [f"{code}\n"], "/x/train.py"))
    up = "H2D" if op in ("to", "cuda") else None
    assert word in fix_of(finding(op, direction=up, **more)).text


def test_fix_for_a_copy_in_a_library() -> None:
    """A copy in a library gets the general suggestion for copies."""
    assert "DataLoader" in fix_of(finding("to", direction="H2D", via=GPU_LINE)).text
