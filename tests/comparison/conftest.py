"""Two recordings of one loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from .recordings import written


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write two recordings, of which the second is slower."""
    folder = tmp_path_factory.mktemp("compare")
    return written(folder, "before", 300), written(folder, "after", 400)
