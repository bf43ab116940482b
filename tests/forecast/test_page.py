"""docs/forecast.md: its table of operators is that of the packaged table, and its errors are within the limits."""

from __future__ import annotations

import re

import pytest
from scripts.forecast_page import PAGE, operators_section

from instrument.forecast.table import packaged_table

TEXT = PAGE.read_text()


def test_the_operators_are_those_of_the_table() -> None:
    """The page was made from the table that ships."""
    assert operators_section(packaged_table()) in TEXT


@pytest.mark.parametrize("worst_of", ["as measured", "today"])
def test_training_steps_on_h100_and_a100(worst_of: str) -> None:
    """The mean error is at most 6.6 %, and the worst at most 15 %, as the page says in its summary."""
    row = re.search(r"^\| h100 and a100 \| train \| 12 \| (.*) \|$", TEXT, re.MULTILINE)
    assert row is not None
    mean, worst, _, mean_today, worst_today = (float(each.strip(" %")) for each in row[1].split("|"))
    average, most = (mean, worst) if worst_of == "as measured" else (mean_today, worst_today)
    assert average <= 6.6
    assert most <= 15


def test_traces_in_bf16() -> None:
    """The mean error of the traces is at most 15 %."""
    row = re.search(r"^\| mean \| \| ([\d.]+)% \|", TEXT, re.MULTILINE)
    assert row is not None
    assert float(row[1]) <= 15


def test_steps_are_those_of_the_table() -> None:
    """The error of steps that a forecast prints is the one in the page."""
    for name, gpu in packaged_table().gpus.items():
        assert gpu.steps is not None
        rows = re.findall(rf"^\| {name} \| \w+ \| [\d x]+ \| \w+ \| [\d.]+ \| ([-+][\d.]+)%", TEXT, re.MULTILINE)
        errors = [abs(float(each)) for each in rows]
        assert len(errors) == gpu.steps.count
        assert sum(errors) / len(errors) == pytest.approx(100 * gpu.steps.error, abs=0.1)
