"""The library's own windows in a dry run: a recording of a pretended GPU would say nothing."""

from __future__ import annotations

from pathlib import Path

import torch

import instrument


def test_no_window_opens_and_its_steps_count(tmp_path: Path) -> None:
    """Nothing is recorded or written, and the steps of the profile are those of the dry run."""

    def train() -> None:
        model = torch.nn.Linear(4, 4, device="cuda")
        for _ in instrument.steps(range(3), tmp_path / "run", wait=0, active=1):
            model(torch.randn(2, 4, device="cuda")).sum().item()

    report = instrument.dry_run(train)
    assert report.error is None
    assert report.steps == 3
    assert [finding.op for finding in report.syncs] == ["item"]
    assert not (tmp_path / "run").exists()
    with instrument.profile(tmp_path / "later", schedule=instrument.schedule(wait=0, active=1)) as prof:
        prof.step()
    assert (tmp_path / "later").exists()
