"""Small files of every format, and ways to damage them: bytes, values of JSON, tables of databases."""

from __future__ import annotations

import copy
import gzip
import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ..support.kineto_text import dumps, ordinary, written
from ..support.protobuf import message
from ..support.xplane import GPU, HOST
from .nsys_report import random_database
from .rocm_files import CSV_FILES, STEP, Kernel, as_json, write_rocpd

Random = random.Random
_STAGES = gzip.decompress((Path(__file__).parents[1] / "data" / "render_stages.pftrace").read_bytes())

NAMES = [
    "",
    "\x1b]0;owned\x07\x1b[31m",
    "\u202eevil\u2066",
    "a\nb\r\tc",
    "x" * 5000,
    "\ud800",
    "ProfilerStep#7",
    "'\"`",
]
NUMBERS = [
    *(0, -1, 1, 2, 7, 1.5, -0.0, 1e-300, 1e300, 2**31 - 1, 2**31, 2**40, 2**53, 2**61, 2**62, 2**63 - 1, 2**63),
    *(-(2**63), 2**64, 10**30, 10**400, True, 1_700_000_000_000_000, float("nan"), float("inf")),
]
VALUES = [*NUMBERS, *NAMES, None, [], {}, [[]], [1, 2, 3], [2**62] * 3, {"name": "x"}, "7", "1e400", b"\xff\xfe"]
JUNK = [b"", b"\0", b"\xff", b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"9" * 30, b"nan", b"{[" * 500]
SQL = [
    "NULL",
    "''",
    "x'ff00'",
    "'text'",
    "1.5",
    "1e300",
    "-1",
    str(2**31),
    str(2**62),
    str(2**63 - 1),
    str(-(2**63)),
]


def kineto() -> dict[str, Any]:
    """Return a trace of torch.profiler with everything that metrics read."""

    def event(cat: str, name: str, tid: Any, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}

    found = json.loads(dumps(ordinary(8)))
    for step in range(3):
        at = 1000.0 * step
        found.append(event("user_annotation", f"ProfilerStep#{step}", 1, at, 900))
        found.append(event("user_annotation", "forward", 1, at + 10, 500, **{"External id": 5 + step}))
        shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}
        found.append(event("cpu_op", "aten::mm", 1, at + 20, 100, **shapes, **{"External id": 9 + step}))
        found.append(event("cuda_runtime", "cudaLaunchKernel", 1, at + 30, 10, correlation=50 + step))
        found.append(event("cuda_runtime", "cudaStreamSynchronize", 1, at + 600, 200, correlation=90 + step))
        size = {"grid": [80, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 50, "blocks per SM": 1.0}
        where = {"device": 0, "stream": 7, "correlation": 50 + step, "External id": 9 + step}
        found.append(event("kernel", "ampere_sgemm_128x64", 7, at + 100, 200, **size, **where))
        collective = {"Collective name": "allreduce", "In msg nelems": 1024, "dtype": "Float"}
        found.append(event("kernel", "ncclDevKernel_AllReduce", 9, at + 250, 200, **collective, **where))
        found.append(event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7, at + 500, 20, bytes=4096, **where))
        found.append(event("python_function", "nn.Module: Linear_0", 1, at + 15, 200))
        memory = {"Bytes": 512, "Addr": 64, "Device Type": 1, "Device Id": 0, "Total Allocated": 4096}
        found.append(event("cpu_instant_event", "[memory]", 1, at + 40, 0, **memory) | {"ph": "i"})
        found.append({"ph": "C", "name": "load", "pid": 1, "tid": 0, "ts": at, "args": {"cpu": 0.5}})
    device = {
        "id": 0,
        "name": "A100",
        "numSms": 108,
        "maxThreadsPerMultiprocessor": 2048,
        "totalGlobalMem": 1 << 36,
    }
    return {
        "schemaVersion": 1,
        "deviceProperties": [device],
        "distributedInfo": {"rank": 1, "world_size": 4, "pg_config": [{"pg_name": "0", "ranks": "[0, 1]"}]},
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "traceEvents": found,
    }


def rocprof() -> dict[str, Any]:
    """Return a rocprofv3 recording of a step with hardware counters."""
    counted = [Kernel("gemm", 10 * n, 10 * n + 7, 100 + n, counters=(("waves", 2.5),)) for n in range(4)]
    return as_json([STEP._replace(kernels=[*STEP.kernels, *counted])])


# Bytes


def bytes_of(dice: Random, data: bytes) -> bytes:
    """Change, remove, double or insert bytes at up to 20 places, or cut off the end."""
    found = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5, 20))):
        place, size = dice.randrange(len(found) + 1), dice.randrange(40)
        part = bytes(found[place : place + size])
        found[place : place + size] = dice.choice([dice.randbytes(size), b"", part * 2, dice.choice(JUNK) + part])
    return bytes(found[: dice.randrange(len(found) + 1)] if dice.random() < 0.1 else found)


# Values of JSON


def json_of(dice: Random, content: Any) -> bytes:
    """Replace, remove, double or move values at up to 20 places."""
    for _ in range(dice.choice((1, 1, 2, 5, 20))):
        _change(dice, content)
    text = json.dumps(content, default=repr, ensure_ascii=dice.random() < 0.8)
    return text.encode("utf-8", "surrogatepass")


def _change(dice: Random, place: Any) -> None:
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = dice.choice(keys)
        if not isinstance(place[key], (dict, list)) or dice.random() < 0.1:
            break
        place = place[key]
    kind = dice.randrange(8)
    if kind == 0:
        del place[key]
    elif kind == 1:
        place[key] = [copy.deepcopy(place[key]) for _ in range(dice.choice((2, 20)))]
    elif kind == 2 and isinstance(place, dict):
        place[dice.choice([*NAMES, *map(str, keys)])] = place.pop(key)
    elif kind == 3 and isinstance(place[key], (int, float)):
        place[key] = place[key] * dice.choice((-1, 1000, 10**9, 10**15))
    else:
        place[key] = copy.deepcopy(dice.choice(VALUES))


# Tables of databases


def tables_of(dice: Random, path: Path) -> None:
    """Change values, columns, tables and views at up to 10 places."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for _ in range(dice.choice((1, 1, 2, 4, 10))):
            with suppress(sqlite3.Error, OverflowError, UnicodeError, LookupError):
                _alter(dice, connection)
        with suppress(sqlite3.Error):
            connection.commit()


def _alter(dice: Random, connection: sqlite3.Connection) -> None:
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    views = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'view'")]
    table = dice.choice(tables)
    columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
    column = dice.choice(columns)
    value, some = dice.choice(SQL), dice.choice(["true", "rowid % 3 = 0", f"rowid = {dice.randrange(1, 20)}"])
    name = dice.choice(["rowid", "_rowid_", "oid", "start", "end", "name", "\u202e", "a b", "x\x1b[2J"])
    statements = [
        f'UPDATE "{table}" SET "{column}" = {value} WHERE {some}',
        f'UPDATE "{table}" SET "{column}" = {value} WHERE {some}',
        f'UPDATE "{table}" SET "{column}" = "{dice.choice(columns)}" * {dice.choice((-1, 1000, 1 << 40))}',
        f'UPDATE "{table}" SET "{column}" = CAST(x\'ff1b5b333166e280ae\' AS TEXT) WHERE {some}',
        f'UPDATE "{table}" SET "{column}" = replace("{column}", {dice.randrange(10)}, {dice.choice(SQL[-5:])})',
        f'DELETE FROM "{table}" WHERE {some}',
        f'INSERT INTO "{table}" SELECT * FROM "{table}" LIMIT 50',
        f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{name}"',
        f'ALTER TABLE "{table}" RENAME TO "{dice.choice([*tables, "other"])}"',
        f'ALTER TABLE "{table}" ADD COLUMN "{name}" DEFAULT \'text\'',
        f'ALTER TABLE "{table}" ADD COLUMN "{name}" AS (printf(\'%9000d\', 1))',
        f'DROP TABLE "{table}"',
    ]
    for view in views and [dice.choice(views)]:
        [(sql,)] = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (view,))
        query = sql.partition(" AS ")[2]
        product = ", ".join(f'"{table}" T{number}' for number in range(12))
        endless = "(WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n)"
        statements += [
            f"DROP VIEW {view}",
            f"DROP VIEW {view}; CREATE VIEW {view} AS SELECT V.* FROM ({query}) V, {endless}",
            f"DROP VIEW {view}; CREATE VIEW {view} AS SELECT V.* FROM ({query}) V, {endless} N WHERE N.x < 0",
            f"DROP VIEW {view}; CREATE VIEW {view} AS SELECT V.* FROM ({query}) V, {product}",
            f"DROP VIEW {view}; CREATE VIEW {view} AS SELECT * FROM {dice.choice(views)}",
        ]
    if dice.random() < 0.1:
        connection.execute("PRAGMA writable_schema = ON")
        damage = dice.choice(["CAST(x'ff' || sql AS TEXT)", "replace(sql, '(', '((')", "sql || sql", "NULL"])
        statements = [f"UPDATE sqlite_master SET sql = {damage} WHERE name = '{table}'"]
    connection.executescript(dice.choice(statements))


def _database(write: Callable[[Path], object], suffix: str) -> Callable[[Random, Path], Path]:
    whole: dict[Path, bytes] = {}

    def make(dice: Random, folder: Path) -> Path:
        path = folder / f"mutant{suffix}"
        if folder not in whole:
            path.unlink(missing_ok=True)
            write(path)
            whole[folder] = path.read_bytes()
        path.write_bytes(whole[folder])
        if dice.random() < 0.7:
            tables_of(dice, path)
        if dice.random() < 0.4:
            path.write_bytes(bytes_of(dice, path.read_bytes()))
        return path

    return make


def _text(content: Callable[[], Any], name: str, raw: Callable[[Any], bytes]) -> Callable[[Random, Path], Path]:
    def make(dice: Random, folder: Path) -> Path:
        data = json_of(dice, content()) if dice.random() < 0.7 else raw(content())
        if dice.random() < 0.4:
            data = bytes_of(dice, data)
        if name.endswith(".gz"):
            data = gzip.compress(data, 1)
            data = bytes_of(dice, data) if dice.random() < 0.2 else data
        path = folder / name
        path.write_bytes(data)
        return path

    return make


def _dumped(content: Any) -> bytes:
    return json.dumps(content).encode()


def _binary(content: bytes, name: str) -> Callable[[Random, Path], Path]:
    """Change bytes in place, which leaves most sizes as they are, or as `bytes_of`."""

    def make(dice: Random, folder: Path) -> Path:
        data = bytearray(content)
        for _ in range(dice.choice((1, 3, 20))):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path = folder / name
        path.write_bytes(bytes(data) if dice.random() < 0.7 else bytes_of(dice, content))
        return path

    return make


def _rocprof_csv(dice: Random, folder: Path) -> Path:
    for name, text in CSV_FILES.items():
        data = text.encode()
        (folder / f"1_{name}.csv").write_bytes(bytes_of(dice, data) if dice.random() < 0.5 else data)
    return folder / "1_kernel_trace.csv"


def tree() -> list[dict[str, Any]]:
    """Return a tree of Triton's Proton: a kernel in a scope."""
    metrics = {"count": 3, "device_id": "0", "device_type": "CUDA", "time (ns)": 700}
    kernel = {"children": [], "frame": {"name": "add", "type": "function"}, "metrics": metrics}
    scope = {"children": [kernel] * 3, "frame": {"name": "forward", "type": "function"}, "metrics": {}}
    return [{"children": [scope] * 3, "frame": {"name": "ROOT"}, "metrics": {}}, {"CUDA": {}}]


def queries() -> list[dict[str, float]]:
    """Return the times of queries as trtexec writes them."""
    keys = ("startEnqMs", "endEnqMs", "startH2dMs", "endH2dMs", "startComputeMs", "endComputeMs")
    return [{key: 10 * row + place for place, key in enumerate(keys)} for row in range(4)]


def _other(dice: Random, folder: Path) -> Path:
    """Write a file of another tool, or random bytes, under any name."""
    csv = (
        b'"Kind","Agent_Id","Kernel_Name","Start_Timestamp","End_Timestamp"\n'
        + b'"KERNEL_DISPATCH",2,"k",1,2\n' * 9
    )
    ncu = b"NVR\0" + bytes(range(256)) * 8
    data = dice.choice([csv, ncu, b"", b"\x1f\x8b", b"SQLite format 3\0", written(ordinary(3), style="array")])
    suffix = dice.choice([".csv", ".ncu-rep", ".json", ".json.gz", ".sqlite", ".db", ".nsys-rep", ""])
    path = folder / f"other{suffix}"
    path.write_bytes(bytes_of(dice, data))
    return path


MAKERS: dict[str, Callable[[Random, Path], Path]] = {
    "kineto": _text(kineto, "mutant.json", _dumped),
    "kineto gzip": _text(kineto, "mutant.json.gz", _dumped),
    "rocprof": _text(rocprof, "results.json", _dumped),
    "rocprof gzip": _text(rocprof, "results.json.gz", _dumped),
    "rocpd 3": _database(lambda path: write_rocpd(path, [STEP], 3), ".db"),
    "rocpd 4": _database(lambda path: write_rocpd(path, [STEP, STEP._replace(pid=200)], 4), ".db"),
    "nsys": _database(lambda path: random_database(1).write(path), ".sqlite"),
    "rocprof csv": _rocprof_csv,
    "xplane": _binary(message((1, HOST), (1, GPU)), "mutant.xplane.pb"),
    "perfetto": _binary(_STAGES, "mutant.pftrace"),
    "proton": _text(tree, "mutant.hatchet", _dumped),
    "trtexec": _text(queries, "times.json", _dumped),
    "other": _other,
}
"""For each format, a function that writes a damaged file into a folder."""
