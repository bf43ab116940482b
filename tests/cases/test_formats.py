"""A file that is no trace is named, with what to do; a packed trace is read."""

from __future__ import annotations

import bz2
import dataclasses
import gc
import gzip
import io
import json
import lzma
import pickle
import random
import sqlite3
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from instrument.base.errors import TraceError
from instrument.read.jobs.archives import Allowance, unpack
from instrument.read.jobs.read import read_any, read_trace, read_traces
from instrument.read.kineto import text
from instrument.read.memory.read import read_memory
from instrument.start.cli import app
from tests.traces.mutants import bytes_of

PLACE = {"pid": 1, "tid": 1, "ts": 5, "dur": 7}
OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "args": {"a": 1}} | PLACE
TRACE = json.dumps({"traceEvents": [OPERATOR]}).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n"


def zipped(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def tarred(mode: str = "w", **files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def linked(target: str) -> bytes:
    """Return a tar archive with a link named like a trace."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        info = tarfile.TarInfo("trace.json")
        info.type, info.linkname = tarfile.SYMTYPE, target
        archive.addfile(info)
    return packed.getvalue()


def of_rank(rank: int) -> bytes:
    return json.dumps({"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": [OPERATOR]}).encode()


RANKS = {f"run/rank{rank}.json": of_rank(rank) for rank in range(2)}
PACKED: dict[str, bytes] = {
    "t.json.zip": zipped(**{"t.json": TRACE}),
    "issue.zip": zipped(
        **{"README.md": b"steps", "__MACOSX/._t.json": b"x", "run/t.json.gz": gzip.compress(TRACE)}
    ),
    "t.json.xz": lzma.compress(TRACE),
    "t.json.bz2": bz2.compress(TRACE[:20]) + bz2.compress(TRACE[20:]),
    "t.tar": tarred(**{"t.json": TRACE}),
    "t.tar.gz": tarred("w:gz", **{"run/t.json": TRACE}),
    "t.tar.xz": tarred("w:xz", **{"t.json": TRACE}),
    "t.json": lzma.compress(TRACE),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_traces(tmp_path: Path, name: str) -> None:
    """The one trace in an archive, or in a compressed file, is read; its file can be read again for args."""
    path = tmp_path / name
    path.write_bytes(PACKED[name])
    trace = read_trace(path)
    assert (trace.path, trace.operators.duration_ns.tolist(), bool(trace.lost)) == (path, [7000], False)
    assert trace.args(trace.operators, 0) == {"a": 1}


def test_copies_of_a_packed_trace(tmp_path: Path) -> None:
    """A trace made from one that is gone has its args; nothing is left when the last one is gone."""
    path = tmp_path / "t.json.xz"
    path.write_bytes(PACKED["t.json.xz"])
    before = set(Path(tempfile.gettempdir()).glob("instrument-*"))
    trace = dataclasses.replace(read_trace(path))
    gc.collect()
    assert trace.args(trace.operators, 0) == {"a": 1}
    del trace
    gc.collect()
    assert before == set(Path(tempfile.gettempdir()).glob("instrument-*"))


BOMB = lzma.compress(b"[" + b" " * (1 << 20)) * 300  # streams one after the other: compressing them all takes 7 s


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "empty.zip": (zipped(**{".DS_Store": b""}), "it is an archive without a file"),
    "model.pt": (zipped(**{"archive/data.pkl": b"x", "archive/version": b"3"}), "it is a file of torch.save"),
    "cut.zip": (PACKED["t.json.zip"][:-30], "it cannot be unpacked: File is not a zip file"),
    "two.zip": (
        zipped(**{"a.txt": b"a", "b.csv": b"b"}),
        "an archive of 2 files, such as a.txt, and none is named",
    ),
    "many.zip": (
        zipped(**{f"{n}.json": b"" for n in range(10_001)}),
        "an archive of more than 10,000 files: unpack",
    ),
    "bombs.zip": (
        zipped(**{f"{n}.json": b"[" + b" " * (70 << 20) for n in range(4)}),
        "more than 200 times its size",
    ),
    "link.tar": (linked("/etc/passwd"), "it is an archive without a file"),
    "cut.json.xz": (PACKED["t.json.xz"][:-30], "it cannot be unpacked: it is cut off"),
    "bomb.json.xz": (BOMB, "it unpacks to more than 200 times its size"),
    "t.lz4": (b"\x04\x22\x4d\x18....", "it is compressed with LZ4"),
    "t.7z": (b"7z\xbc\xaf\x27\x1c..", "it is compressed with 7-Zip"),
    "lfs.json": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n",
        "it is a pointer of Git LFS",
    ),
    "lfs.sqlite": (POINTER, "git lfs pull fetches"),
    "annex.json": (b"/annex/objects/MD5E-s12--0f.json\n", "it is a pointer of git-annex: git annex get"),
    "trace.json.dvc": (b"outs:\n- md5: 0f\n  path: t.json\n", "it is a pointer of DVC: dvc pull"),
    "page.json": (
        b"\n\n<!DOCTYPE html>\n<html>",
        "it is an HTML page, such as a login or an error page",
    ),
    "page.sqlite": (b"<html><head>", "it is an HTML page"),
    "denied.json": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "it is XML"),
    "t.hatchet": (b'[{"children": [], "frame": {"name": "ROOT"}, "metrics": {}}, {}]', "it is a Hatchet profile"),
    "trt.json": (b'[\n  { "count" : 340 }\n, { "name" : "conv1" }\n]', "it is a profile of TensorRT"),
    "et.json": (
        b'{\n  "schema": "1.1.1-chakra.0.0.4", "pid": 5, "time": "2026", "start_ts": 1,\n  "nodes": [\n',
        "it is an execution trace",
    ),
    "et_old.json": (b'{"schema": "1.0.1", "pid": 5, "nodes": []}', "it is an execution trace"),
    "rank0.et": (b"\x0b\x0a\x051.0.0", "it is an execution trace"),
    "k.ncu-rep": (b"NVR\0\2\0\0\0", "it is a report of Nsight Compute"),
    "kernel": (b"NVR\0\2\0\0\0", "it is a report of Nsight Compute"),
    "s.qdstrm": (b"\1\2\3", "it is a raw recording of Nsight Systems"),
    "s.pickle": (pickle.dumps({"segments": []}), "which instrument memory reads"),
    "s.json.gz": (gzip.compress(pickle.dumps([])), "which instrument memory reads"),
    "old.pt": (
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M",
        "it is a checkpoint, as older versions of torch.save",
    ),
    "m.safetensors": (b'\x40\0\0\0\0\0\0\0{"w":{"dtype":"F32"}}', "it is a file of safetensors"),
    "m.gguf": (b"GGUF\3\0\0\0", "it is a model in GGUF"),
    "picture.json": (b"\x89PNG\r\n", "it is a picture"),
    "paper.json": (b"%PDF-1.7", "it is a PDF"),
    "python": (b"\x7fELF\2\1", "it is a program"),
    "perf.data": (b"PERFILE2h", "it is a recording of Linux perf"),
    "table.txt": (
        b"-" * 25 + b"  " + b"-" * 12 + b"\n      Name    Self CPU %\n",
        "a printed table of torch.profiler",
    ),
    "metrics.json": (
        b'{"epoch": 3, "loss": [1]}',
        'it has no array of "traceEvents", but "epoch", "loss": give a trace',
    ),
    "other.db": (b"", "it is empty"),
    "a.npy": (b"\x93NUMPY\x01\x00v", "it is a NumPy array"),
    "a.parquet": (b"PAR1\x15\x04", "it is a Parquet file"),
    "a.json": (b"", "it is empty"),
    "profile.json": (
        b'{"$schema": "https://www.speedscope.app/file-format-schema.json", "profiles": []}',
        "it is a profile for speedscope",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_a_file_is(tmp_path: Path, name: str) -> None:
    """One sentence says what the file is and what to do, and a command ends with it."""
    content, said = UNREADABLE[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert caught.value.reason.startswith(said) or said in caught.value.reason
    assert len(caught.value.reason) < 230
    shown = CliRunner().invoke(app, ["summarize", str(path)])
    assert (shown.exit_code, said in " ".join(shown.output.split())) == (1, True)


@pytest.mark.parametrize("content", [tarred("w:gz", **RANKS), zipped(**RANKS, **{"run/settings.json": b"{}"})])
def test_an_archive_of_ranks(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traces of an archive are the ranks of a job, and commands show them; the copies go with the traces."""
    path = tmp_path / "ranks.zip"
    path.write_bytes(content)
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    traces = read_traces(path)
    assert (traces.ranks, traces.world_size, traces.failed) == ([0, 1], 2, {})
    assert [trace.path for trace in traces.values()] == [path / name for name in RANKS]
    assert traces[1].args(traces[1].operators, 0) == {"a": 1}
    with pytest.raises(TraceError, match="it holds the traces of 2 ranks, which read_traces reads"):
        read_trace(path)
    assert CliRunner().invoke(app, ["diagnose", str(path)]).exit_code == 0
    del traces
    gc.collect()
    assert not list(copies.iterdir())


def test_one_trace_beside_settings(tmp_path: Path) -> None:
    """JSON of another kind in an archive is no second trace."""
    path = tmp_path / "issue.zip"
    path.write_bytes(zipped(**{"t.json": TRACE, "config.json": b'{"lr": 1}'}))
    assert (read_trace(path).path, len(read_trace(path).operators)) == (path, 1)


@pytest.mark.parametrize(
    "name", ["../../out.json", "/tmp/out.json", "..\\out.json", "a/../../out.json", "C:/out.json"]
)
def test_members_that_point_elsewhere(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No member of an archive is written outside of the folder of its copy."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = tmp_path / "t.zip"
    path.write_bytes(zipped(**{name: TRACE}))
    trace = read_trace(path)
    assert len(trace.operators) == 1
    assert sorted(tmp_path.iterdir()) == [path, folder]
    assert not Path("/tmp/out.json").exists()
    assert all(file.parent.parent == folder or file.is_relative_to(folder) for file in folder.rglob("*"))


@pytest.mark.parametrize("name", ["rank{}.json", "rank{}.json.gz", "rank{}.sqlite", "run/rank{}.json"])
def test_a_folder_of_pointers(tmp_path: Path, name: str) -> None:
    """The error for a folder whose files Git LFS has not fetched says what fetches them."""
    (tmp_path / "run").mkdir()
    for rank in range(2):
        (tmp_path / name.format(rank)).write_bytes(POINTER)
    with pytest.raises(TraceError, match=rf"{name.format(0)}: it is a pointer of Git LFS: git lfs pull fetches"):
        read_traces(tmp_path)


def test_a_link_of_git_annex(tmp_path: Path) -> None:
    """The link to a file that git-annex has not fetched says what fetches it."""
    path = tmp_path / "t.json"
    path.symlink_to(".git/annex/objects/MD5E-s12--0f.json")
    with pytest.raises(FileNotFoundError, match="git annex get fetches it"):
        read_trace(path)


def test_layers_share_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layers of a file unpack to counts together, against the size of the outermost file."""
    monkeypatch.setattr(text, "_BOMB_BYTES", 0)
    inner = lzma.compress(random.Random(1).randbytes(1000) + b" " * 200_000)
    path = tmp_path / "t.json.xz"
    path.write_bytes(lzma.compress(inner + bytes(200_000)))
    with pytest.raises(TraceError, match="more than 200 times its size"):
        read_trace(path)


def test_members_in_each_others_way(tmp_path: Path) -> None:
    """No member of an archive is lost to another whose name becomes the same, or is that of its folder."""
    path = tmp_path / "ranks.zip"
    path.write_bytes(zipped(**{f"run/rank{mark}.json": of_rank(rank) for rank, mark in enumerate("?*")}))
    assert (read_traces(path).ranks, read_traces(path).failed) == ([0, 1], {})
    for names in (["a.json", "a.json/b.json", "a.json/b.json/c.json"], ["a.json/b.json/c.json", "a.json"]):
        files = unpacked(tmp_path, zipped(**{name: name.encode() for name in names}))
        assert sorted(file.read_text() for file in files) == sorted(names)


def unpacked(tmp_path: Path, content: bytes) -> list[Path]:
    """Return the files that an archive unpacks to."""
    path, folder = tmp_path / "packed", Path(tempfile.mkdtemp(dir=tmp_path))
    path.write_bytes(content)
    return unpack(path, content[:300], Allowance(len(content)), folder)


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_members_behind_many_folders(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    """Folders count as well as files: a trace behind too many of them is not lost in silence."""
    path = tmp_path / "t.zip"
    path.write_bytes(pack(**{f"{number}/": b"" for number in range(10_001)}, **{"t.json": TRACE}))
    with pytest.raises(TraceError, match="more than 10,000 files"):
        read_trace(path)


@pytest.mark.parametrize("damage", range(30))
def test_damaged_archives(tmp_path: Path, damage: int) -> None:
    """An archive with wrong bytes anywhere is read, or is one error."""
    path = tmp_path / "t.zip"
    packed = [zipped(**RANKS), tarred("w:gz", **RANKS), tarred(**RANKS), PACKED["t.json.xz"], PACKED["t.json.bz2"]]
    with suppress(ImportError):
        packed.append(import_module("zstandard").compress(TRACE))
    for content in packed:
        path.write_bytes(bytes_of(random.Random(damage), content))
        try:
            read_any(path)
        except TraceError as error:
            assert error.path == path


def test_an_encrypted_archive(tmp_path: Path) -> None:
    """An archive with a password says that it is encrypted."""
    content = bytearray(zipped(**{"t.json": TRACE}))
    for magic, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(magic) + at] |= 1
    path = tmp_path / "t.zip"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="encrypted, password required"):
        read_trace(path)


def test_zstandard(tmp_path: Path) -> None:
    """A trace that is compressed with Zstandard, also in several frames; damage is said."""
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.compress(TRACE[:20]) + zstandard.compress(TRACE[20:])
    path = tmp_path / "t.json.zst"
    path.write_bytes(packed)
    assert read_trace(path).operators.duration_ns.tolist() == [7000]
    path.write_bytes(packed[:12] + b"damaged" + packed[12:])
    with pytest.raises(TraceError, match="it cannot be unpacked"):
        read_trace(path)


def test_without_a_package_for_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the error says which command installs it."""
    for name in ("compression", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "t.json.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x04\x00")
    with pytest.raises(
        TraceError, match=r"pip install 'torch-instrument\[zstd\]'; or unpack it first, with zstd -d"
    ):
        read_trace(path)


def test_databases_of_other_programs(tmp_path: Path) -> None:
    """A database of another program is named by its tables."""
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE experiments(id)")
    with pytest.raises(
        TraceError, match="an SQLite database with the tables experiments, and none of Nsight Systems"
    ):
        read_trace(path)


def test_an_archive_that_holds_itself(tmp_path: Path) -> None:
    """Archives in archives end after three layers."""
    content = TRACE
    for _ in range(4):
        content = zipped(**{"t.zip": content})
    path = tmp_path / "t.zip"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda: TRACE, "it is JSON, such as a trace, which instrument diagnose reads"),
        (lambda: b"<!DOCTYPE html>", "it is an HTML page"),
        (lambda: b"hello", "it is not a pickle, the format in which torch writes memory snapshots"),
    ],
)
def test_what_a_memory_snapshot_is_not(tmp_path: Path, content: Callable[[], bytes], said: str) -> None:
    """A file that is given for a memory snapshot is named as well."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content())
    with pytest.raises(TraceError, match=said):
        read_memory(path)
