"""A progress bar for large files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..imports import import_without_drawing
from ..printable import printable

_MIN_BYTES = 100_000_000  # bytes; smaller files take about a second


@contextmanager
def progress_bar(path: Path) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of bytes read; at a terminal, it moves a bar for a large file."""
    size = path.stat().st_size
    if size < _MIN_BYTES or sys.stderr is None or not sys.stderr.isatty():
        yield lambda read: None
        return
    try:
        import_without_drawing("rich.style")
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:  # a program may have a module of that name
        yield lambda read: None
        return
    columns = (
        TextColumn("reading {task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(printable(path.name), total=size)
        yield lambda read: bar.advance(task, read)
