"""Shows the progress of reading a large file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from ...base.imports import import_without_drawing
from ...base.printable import printable

_MIN_BYTES = 100_000_000  # bytes; smaller files take about a second
watching: ContextVar[Callable[[int, int], None] | None] = ContextVar("watching", default=None)
"""What is called instead of a bar, with the bytes read and the size of the file; it may raise an error."""


@contextmanager
def progress_bar(path: Path) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of bytes read: it calls `watching`, or moves a bar at a terminal."""
    size = path.stat().st_size
    if watch := watching.get():
        yield lambda read: watch(read, size)
        return
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
