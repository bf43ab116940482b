"""`instrument calibrate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from instrument.forecast.calibrate import this_gpu
from instrument.forecast.gpus import GPUS
from instrument.forecast.operations import matmul
from instrument.forecast.operator_time import operator_time
from instrument.forecast.table import read_table
from instrument.start.cli import app


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    """The command says so, and writes nothing."""
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / "table.json.gz")])
    assert result.exit_code == 1
    assert "there is no GPU to measure" in result.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA A100 80GB PCIe", "a100"), ("Tesla V100-PCIE-16GB", "v100")],
)
def test_the_gpu_by_its_name(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another board of a known GPU counts as that one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert this_gpu().name == name


def test_an_unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it, and those that are known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    with pytest.raises(ValueError, match=r"h100, h200, .*, and not NVIDIA GeForce RTX 4090"):
        this_gpu()


@pytest.mark.gpu
@pytest.mark.gpu_sim
def test_calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of this machine has the families of operators, and forecasts what it measured."""
    if torch.cuda.get_device_name() == "Simulated GPU":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    file = tmp_path / "table.json.gz"
    result = CliRunner().invoke(app, ["calibrate", str(file), "--seconds", "20"])
    assert result.exit_code == 0, result.stderr
    table = read_table(file)
    (name,) = table.gpus
    assert ("linear", "fp32") in table.gpus[name].families
    found = operator_time(matmul("linear", "fp32", 1, 2048, 1024, 1024), GPUS[name], table)
    assert found.how == "measured"
    assert found.ns > 0
