"""Opens SQLite files from untrusted sources: read-only, with limits on size, rows and time."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ...base.errors import TraceError

DATABASE_ERRORS = (sqlite3.Error, UnicodeError)
"""The errors that a damaged database raises; UnicodeError if the text of SQLite's message is damaged."""

_MAGIC = b"SQLite format 3\0"
_ROW_BYTES = 6  # the size of the smallest row
_SECONDS = 5.0  # of CPU time for a small file: real ones take milliseconds
_BYTES_PER_SECOND = 1 << 20  # for a large file; real ones are many times faster
_INSTRUCTIONS = 100_000  # of SQLite's virtual machine between checks of the clock: about 1 ms
_SMALL_ROWS, _SMALL_BYTES = 100_000, 1 << 26
_LIMITS = {
    "SQLITE_LIMIT_LENGTH": 1 << 25,  # bytes of one row
    "SQLITE_LIMIT_SQL_LENGTH": 1 << 20,
    "SQLITE_LIMIT_COLUMN": 1000,
    "SQLITE_LIMIT_EXPR_DEPTH": 200,
    "SQLITE_LIMIT_COMPOUND_SELECT": 500,  # rocpd merges processes by UNION ALL
    "SQLITE_LIMIT_VDBE_OP": 1_000_000,
    "SQLITE_LIMIT_LIKE_PATTERN_LENGTH": 1000,
    "SQLITE_LIMIT_ATTACHED": 0,
    "SQLITE_LIMIT_TRIGGER_DEPTH": 1,
    "SQLITE_LIMIT_WORKER_THREADS": 0,
}
_SETTINGS = {  # Python 3.12
    "SQLITE_DBCONFIG_TRUSTED_SCHEMA": False,
    "SQLITE_DBCONFIG_ENABLE_TRIGGER": False,
    "SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER": False,
    "SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION": False,
}
_DENIED = {sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_ATTACH}  # in views and generated columns as well


def is_database(path: Path) -> bool:
    """Return whether the file begins like an SQLite database.

    Raises:
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def row_limit(path: Path) -> int:
    """Return the number of rows that a table, or a view with one row per row of a table, can have."""
    return path.stat().st_size // _ROW_BYTES


def text_limit(path: Path) -> int:
    """Return the number of characters that the distinct strings in the file can have together."""
    return (1 << 26) + 4 * path.stat().st_size


def query_small(
    connection: sqlite3.Connection, query: str, values: Sequence[int] = ()
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query with few rows.

    Raises:
        sqlite3.Error: the query fails, or has more than 100,000 rows or 64 MiB of text.
        UnicodeError: the query fails, and the message is not UTF-8.
    """
    size = 0
    for count, row in enumerate(connection.execute(query, values), 1):
        size += sum(len(value) for value in row if isinstance(value, (str, bytes)))
        if count > _SMALL_ROWS or size > _SMALL_BYTES:
            raise sqlite3.DataError(f"more than {_SMALL_ROWS:,} rows or {_SMALL_BYTES >> 20} MiB")
        yield tuple(row)


@contextmanager
def open_database(path: Path, database: Path | None = None, *, log: bool = True) -> Iterator[sqlite3.Connection]:
    """Open a database for reading; bytes of text that are not UTF-8 become U+FFFD.

    Recursive queries are refused. All statements together may take 5 s of CPU time, plus 1 s per MiB of the file.

    Args:
        path: the file that errors name.
        database: the file to open, if it is another file.
        log: whether to read a write-ahead log beside the file. Without a log, no file is created and no lock
            taken.

    Raises:
        TraceError: the database is damaged, or reading it takes too long.
    """
    database = database or path
    with_log = log and database.with_name(database.name + "-wal").exists()
    seconds = _SECONDS + database.stat().st_size / _BYTES_PER_SECOND
    end = time.thread_time() + seconds
    late = False

    def too_late() -> bool:
        nonlocal late
        late = late or time.thread_time() > end
        return late

    try:
        uri = f"{database.absolute().as_uri()}?mode=ro{'' if with_log else '&immutable=1'}"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            _restrict(connection)
            connection.set_progress_handler(too_late, _INSTRUCTIONS)
            yield connection
    except DATABASE_ERRORS as error:
        if not late:
            raise TraceError(path, f"damaged database: {error}") from None
    if late:
        raise TraceError(path, f"reading it takes more than {seconds:.0f} s, too long for its size")


def _restrict(connection: sqlite3.Connection) -> None:
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    if hasattr(connection, "setlimit"):  # Python 3.11
        for name, most in _LIMITS.items():
            connection.setlimit(getattr(sqlite3, name), most)
    if hasattr(connection, "setconfig"):
        for name, value in _SETTINGS.items():
            connection.setconfig(getattr(sqlite3, name), value)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA mmap_size = 0")
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_DENY if action in _DENIED else sqlite3.SQLITE_OK)
