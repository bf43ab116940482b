"""Any bytes give a trace or a TraceError; local damage costs no event elsewhere; time and memory are bounded."""

from __future__ import annotations

import gzip
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instrument.base.errors import TraceError
from instrument.read.jobs.read import read_file
from instrument.read.kineto import text
from instrument.read.tables.table import COLUMNS
from instrument.read.tables.trace import Trace

from ..support.kineto_text import STYLES, Event, dumps, events, ordinary, since_1970, written

pytestmark = pytest.mark.corpus

JUNK = [
    b'{"ph":"X"', b'},{"ph":', b'{"ph":"X","name":"', b'"}]}', b"]", b"[", b"}", b'"', b"\\", b"\0" * 40, b"\xff",
    b"\x01", b"null", b"nan", b"N/A", b"C:\\Users", b"1e400", b"9" * 30, b"9" * 5000, b'"\\ud800"', b"[[" * 3000,
    b"ProfilerStep#" + b"9" * 20,
]  # fmt: skip
junk = st.one_of(
    st.binary(max_size=12),
    st.text(alphabet='{}[]",:\\0a \n', max_size=6).map(str.encode),
    st.sampled_from(JUNK),
)
blocks = st.sampled_from([7, 50, 300, 1 << 20])
quick = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "trace.json"


def read(path: Path, data: bytes, block: int = 1 << 20) -> Trace | None:
    """Return the trace, or None after an error that names the file."""
    path.write_bytes(data)
    began = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(text, "BLOCK", block)
        try:
            found = read_file(path)
        except TraceError as error:
            assert str(path) in str(error)
            return None
        finally:
            assert time.perf_counter() - began < 5
        trace: Trace = pickle.loads(pickle.dumps(found))
        for kind in COLUMNS:
            table = getattr(trace, kind)
            assert all(isinstance(trace.args(table, row), dict) for row in range(len(table)))
    return trace


@quick
@given(data=st.binary(max_size=400))
def test_any_bytes(path: Path, data: bytes) -> None:
    """Random bytes, also inside a gzip file or as events, give a trace or a TraceError."""
    read(path, data)
    read(path, gzip.compress(data, 1))
    read(path, b'{"traceEvents": [' + data)


@quick
@given(
    events=events() | events(times=since_1970),
    style=st.sampled_from(STYLES),
    damages=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 80), junk), max_size=4),
    block=blocks,
    packed=st.booleans(),
)
def test_damaged_traces(
    path: Path, events: list[Event], style: str, damages: list[tuple[float, int, bytes]], block: int, packed: bool
) -> None:
    """Replacing, removing or inserting parts of a valid trace gives a trace or a TraceError."""
    data = written(events, style=style)
    for at, length, junk in damages:
        place = int(at * len(data))
        data = data[:place] + junk + data[place + length :]
    read(path, gzip.compress(data, 1) if packed else data, block)


@settings(quick, max_examples=60)  # each one packs a file
@given(place=st.integers(0, 10_000), bits=st.integers(1, 255), end=st.integers(0, 10_000), block=blocks)
def test_damaged_gzip(path: Path, place: int, bits: int, end: int, block: int) -> None:
    """A gzip file with a changed byte or a missing end gives a trace or a TraceError."""
    data = bytearray(gzip.compress(written(ordinary(50)), 1, mtime=0))
    data[place % len(data)] ^= bits
    read(path, bytes(data[: max(end, len(data) // 2)]), block)


def by_name(trace: Trace | None) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for kind in ("operators", "gpu", "frames", "runtime") if trace else ():
        table = getattr(trace, kind)
        for row, name in enumerate(table.text("name")):
            times = int(table.start_ns[row]), int(table.duration_ns[row])
            found[name] = kind, *times, repr(trace.args(table, row)) if trace else ""
    return found


@quick
@given(
    style=st.sampled_from(STYLES),
    place=st.integers(0, 4000),
    length=st.integers(0, 60),
    junk=junk,
    block=blocks,
)
def test_damage_in_one_place(path: Path, style: str, place: int, length: int, junk: bytes, block: int) -> None:
    """Every event outside the damage is read, with the same times and args."""
    data = written(ordinary(9), style=style)
    place %= len(data)
    damaged = by_name(read(path, data[:place] + junk + data[place + length :], block))
    for name, event in by_name(read(path, data)).items():
        begin = data.rindex(b"{", 0, data.index(f'"{name}"'.encode()))
        end = data.index(b"}", data.index(b'"pad"', begin))
        end = data.index(b"}", end + 1) + 1
        if end <= place or begin >= place + length:
            assert event == damaged.get(name)


# Large hostile files

HEAD = b'{"traceEvents": ['


def damaged(damage: Callable[[str], str]) -> bytes:
    lines = [damage(dumps(event)) for event in ordinary(20_000, 100)]
    return HEAD + ",\n".join(lines).encode() + b"]}"


@pytest.mark.parametrize(
    ("damage", "read", "repaired"),
    [
        (lambda line: line.replace("event ", "C:\\Users\\x "), 20_000, 20_000),
        (lambda line: line.replace("event ", '{"device": "cpu"} '), 20_000, 20_000),
        (lambda line: line.replace('"correlation": ', '"correlation": nan, "x": '), 20_000, 20_000),
        (lambda line: line.replace('"pad": ', '"pad": : '), 20_000, 20_000),
        (lambda line: line[: len(line) // 2] + line, 20_000, 0),
        (lambda line: line + "; ", 20_000, 0),
    ],
)
def test_many_damaged_events(path: Path, damage: Callable[[str], str], read: int, repaired: int) -> None:
    """20,000 damaged events are read within seconds."""
    path.write_bytes(damaged(damage))
    began = time.perf_counter()
    trace = read_file(path)
    assert time.perf_counter() - began < 15
    assert read == sum(len(getattr(trace, kind)) for kind in ("operators", "gpu", "frames", "runtime"))
    assert repaired == trace.lost.repaired


ROOT = Path(__file__).parents[2]

MEMORY = """
import sys
from pathlib import Path
from instrument.base.errors import TraceError
from instrument.read.jobs.read import read_file
from tests.support.memory import peak_kib
before = peak_kib()
try:
    read_file(Path(sys.argv[1]))
except TraceError:
    pass
print(peak_kib() - before)
"""


@pytest.mark.parametrize(
    "parts",
    [
        (HEAD, b"[" * 1_000_000, 40),
        (HEAD, b'{"ph":' * 200_000, 3),
        (HEAD + b'{"ph":"X","name":"', b"a" * 1_000_000, 100),
        (HEAD + b'{"ph":"X","args":[', b"1," * 500_000, 40),
        (b"", b"\0" * 1_000_000, 100),
        (HEAD + b'{"ph":"X","name":"a","ts":1}', b"\0" * 1_000_000, 100),
    ],
    ids=["deep", "deep objects", "endless string", "endless list", "zeros", "zeros at the end"],
)
def test_memory_and_time(tmp_path: Path, parts: tuple[bytes, bytes, int]) -> None:
    """A file with an endless event is processed in parts of about 16 MiB."""
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.write(parts[0])
        if parts[1].strip(b"\0"):
            file.writelines([parts[1]] * parts[2])
        else:
            file.truncate(len(parts[0]) + len(parts[1]) * parts[2])  # zeros that take no space on the disk
    command = [sys.executable, "-c", MEMORY, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    assert int(done.stdout) < 400_000, "KiB"
