"""Slim traces of real traces: nothing differs, and the sizes are those of docs/slim.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.slim_page import PAGE, made_slim

from instrument import slim

from ..support.shared_traces import FOLDER, shared

_ROW = re.compile(r"^\| `([^`]+)` \|(?:[ \d,]+\|){4} ([\d.]+) \|$", re.MULTILINE)
SAMPLES = {name: float(factor) for name, factor in _ROW.findall(PAGE.read_text())}
_SMALL = 4_000  # bytes: below, the head of the file and the names are most of it
_ZLIB = 0.03  # other versions of zlib differ by less


def test_the_page_has_all_samples() -> None:
    """The table is not empty."""
    assert len(SAMPLES) > 30


@pytest.mark.corpus
@pytest.mark.parametrize("name", SAMPLES)
def test_real_traces(name: str, tmp_path: Path) -> None:
    """Metrics and findings are the same, a second time nothing becomes larger, and the table tells the factor."""
    sample = made_slim(shared(name), FOLDER, tmp_path / "out.json.gz")
    assert sample is not None
    assert sample.slim.changed == ()
    assert sample.factor == pytest.approx(SAMPLES[name], rel=_ZLIB, abs=0.06)
    assert sample.factor >= 2 or sample.packed_bytes < _SMALL
    again = made_slim(sample.slim.path, tmp_path, tmp_path / "again.json.gz")
    assert again is not None
    assert again.slim.bytes <= sample.slim.bytes


@pytest.mark.corpus
@pytest.mark.parametrize("name", SAMPLES)
def test_anonymized_real_traces(name: str, tmp_path: Path) -> None:
    """All numbers and findings are the same with stand-ins for names."""
    assert slim(shared(name), tmp_path / "out.json.gz", anonymize=True).changed == ()


def test_owlv2_is_an_eighth() -> None:
    """The trace of a large model, with stacks, is 8 times smaller."""
    assert SAMPLES["tl_h100_owlv2.json.gz"] >= 8
