"""A window that might fill the disk is skipped, with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from instrument.base.disk import refuse_full_disk
from instrument.base.errors import CaptureError

from .training import manifest, reasons, run

GB = 10**9


class Usage(NamedTuple):
    """What `shutil.disk_usage` returns."""

    total: int
    used: int
    free: int


def pretend(monkeypatch: pytest.MonkeyPatch, *frees: int, total: int = 100 * GB) -> None:
    """Pretend that so many bytes are free at each call, the last number from then on."""
    left = list(frees)

    def usage(path: Any) -> Usage:
        assert Path(path).exists()
        return Usage(total, 0, left.pop(0) if len(left) > 1 else left[0])

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_windows_are_skipped_while_the_disk_is_nearly_full(
    out: Path, monkeypatch: pytest.MonkeyPatch, lenient: None
) -> None:
    """The next window is tried again, and training is the same to the last bit."""
    pretend(monkeypatch, 300_000_000, 50 * GB)
    run(out)
    (skipped, reason), recorded = reasons(manifest(out))
    assert "skipped" == skipped
    assert f"only 300 MB are free in {out.parent.parent}, and a window starts with 1.00 GB" == reason
    assert ("recorded", None) == recorded


@pytest.mark.parametrize(
    ("free", "total", "window", "refused"),
    [
        (GB, 100 * GB, 0, False),
        (GB - 1, 100 * GB, 0, True),
        (2 * GB, 100 * GB, GB // 2, False),
        (2 * GB, 100 * GB, GB, True),
        (20_000_000, 64_000_000, 0, False),
        (3_000_000, 64_000_000, 0, True),
        (0, 0, 0, False),
    ],
)
def test_how_much_must_be_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, total: int, window: int, refused: bool
) -> None:
    """1 GB, or 5 % of a small disk, and twice the last window; a system that does not say is not refused."""
    pretend(monkeypatch, free, total=total)
    if refused:
        with pytest.raises(CaptureError, match="are free in"):
            refuse_full_disk(tmp_path / "a" / "b", window)
    else:
        refuse_full_disk(tmp_path / "a" / "b", window)


def test_the_size_of_the_last_window_counts(out: Path, monkeypatch: pytest.MonkeyPatch, lenient: None) -> None:
    """The second window needs room for a trace like the first."""
    pretend(monkeypatch, GB)
    run(out)
    (_, first), (skipped, reason) = reasons(manifest(out))
    assert (None, "skipped") == (first, skipped)
    assert reason is not None
    assert "only 1.00 GB are free" in reason
