"""Removes the files of old windows, in the process that finishes windows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .storage import Keep
from .stored_windows import StoredWindow, StoredWindows, files_on_disk, is_pinned


def remove_old_windows(
    stored: StoredWindows, keep: Keep, rank: int, now_ns: int, *, uploaded_only: bool = False
) -> list[dict[str, Any]]:
    """Remove the files of the windows of ``rank`` that are beyond the limits of ``keep``.

    The newest window stays, and so do those that a person pinned, which do not count. Windows that somebody asked
    for go after the others. Other ranks' files stay; a folder goes when it is empty.

    Args:
        stored: the windows of the folder.
        keep: the limits.
        rank: the rank of this process.
        now_ns: the time since the epoch.
        uploaded_only: whether a window that was not uploaded stays.

    Returns:
        A line for the manifest for each window whose files were removed, or cannot be, which is reported once.
    """
    lines = []
    for window, files, reason in _beyond_limits(stored, keep, rank, now_ns):
        if uploaded_only and not window.uploaded:
            continue
        removed, left = _remove(files)
        for folder in {path.parent for path in removed}:
            with suppress(OSError):  # not empty
                folder.rmdir()
        if removed or left.keys() - stored.unremovable:
            stored.unremovable.update(left)
            lines.append(
                {
                    "event": "removed",
                    "run": window.run,
                    "rank": window.rank,
                    "window": window.window,
                    "files": [
                        {"path": path.relative_to(stored.folder).as_posix(), "bytes": size}
                        for path, size in removed.items()
                    ],
                    "left": [
                        {"path": path.relative_to(stored.folder).as_posix(), "reason": why}
                        for path, why in left.items()
                    ],
                    "reason": reason,
                    "time_ns": now_ns,
                }
            )
    return lines


def _beyond_limits(
    stored: StoredWindows, keep: Keep, rank: int, now_ns: int
) -> list[tuple[StoredWindow, dict[Path, int], str]]:
    """Return the windows to remove, the first to go first, with their files and the reason.

    A window without steps, as at the end of a loop, counts as older than those with steps; a window that somebody
    asked for as newer than all but the newest.
    """
    beyond, number, total = [], 0, 0
    newest_first = stored.of_rank(rank)[::-1]
    newest_first.sort(key=lambda window: not window.has_steps)
    for window in [*newest_first[:1], *sorted(newest_first[1:], key=_precedence)]:
        files = files_on_disk(stored.folder, window)
        if not files or is_pinned(stored.folder, window):
            continue
        number, total = number + 1, total + sum(files.values())
        reason = _reason(keep, number, total, (now_ns - window.end_ns) / 1e9)
        if number > 1 and reason:
            beyond.append((window, files, reason))
    return beyond[::-1]


def _precedence(window: StoredWindow) -> tuple[bool, bool]:
    return not window.has_steps, not window.requested


def _reason(keep: Keep, number: int, total: int, age_s: float) -> str:
    """Return which limit a window exceeds that is the ``number``-th from the newest; empty for none."""
    if keep.windows is not None and number > keep.windows:
        return f"more than {keep.windows} windows"
    if keep.age_s is not None and age_s > keep.age_s:
        return f"older than {keep.age}"
    if keep.total_bytes is not None and total > keep.total_bytes:
        return f"more than {keep.total}"
    return ""


def _remove(files: Mapping[Path, int]) -> tuple[dict[Path, int], dict[Path, str]]:
    """Remove files; return those that were removed, and the others with the reason."""
    removed, left = dict[Path, int](), dict[Path, str]()
    for path, size in files.items():
        try:
            path.unlink()
            removed[path] = size
        except FileNotFoundError:  # another process removed it
            continue
        except OSError as error:  # such as a folder that cannot be written to
            left[path] = error.strerror or repr(error)
    return removed, left
