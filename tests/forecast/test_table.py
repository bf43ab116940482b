"""The table that ships, and its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.forecast.gpus import GPUS
from instrument.forecast.table import PACKAGED, packaged_table, read_table, write_table

from .tables import content


def test_the_packaged_table_is_small_and_names_its_source() -> None:
    """It is a few hundred kB at most, and says where its measurements are from, and their licence."""
    assert PACKAGED.stat().st_size < 300_000
    source = packaged_table().source
    assert "NeuSight" in source
    assert "MIT" in source


def test_the_packaged_table_states_errors() -> None:
    """Every family has an error between nothing and half, and so have whole steps."""
    for name, gpu in packaged_table().gpus.items():
        assert name in GPUS
        assert gpu.steps is not None
        assert 0 < gpu.steps.error <= gpu.steps.worst
        for family, measured in gpu.families.items():
            assert 0 < measured.error <= 0.5, family
            assert len(measured) > 0


def test_write_and_read(tmp_path: Path) -> None:
    """The same content gives the same bytes, and the table again."""
    files = [tmp_path / "a.gz", tmp_path / "b.gz"]
    for file in files:
        write_table(content("l4"), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert list(read_table(files[0]).gpus) == ["l4"]


@pytest.mark.parametrize("text", ['{"format": 99}', "[]"])
def test_another_format(text: str, tmp_path: Path) -> None:
    """A file of another version, and one that is no table, are errors that name the file."""
    import gzip

    file = tmp_path / "table.json.gz"
    file.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(ValueError, match=r"table\.json\.gz is not a table of measured operators of format 1"):
        read_table(file)


def test_not_compressed(tmp_path: Path) -> None:
    """So is a file of another kind."""
    file = tmp_path / "table.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="is not a table"):
        read_table(file)
