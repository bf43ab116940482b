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
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from instrument.base.errors import TraceError
from instrument.read.jobs.read import read_trace
from instrument.read.memory.read import read_memory
from instrument.start.cli import app

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
    "ranks.tar.gz": (
        tarred("w:gz", **{"rank0.json": TRACE, "rank1.json": TRACE}),
        "it is an archive of 2 files, such as rank0.json: unpack it, and give the folder",
    ),
    "two.zip": (zipped(**{"a.json": TRACE, "b.json": TRACE}), "it is an archive of 2 files, such as a.json"),
    "empty.zip": (zipped(**{".DS_Store": b""}), "it is an archive without a file"),
    "model.pt": (zipped(**{"archive/data.pkl": b"x", "archive/version": b"3"}), "it is a file of torch.save"),
    "cut.zip": (PACKED["t.json.zip"][:-30], "it is a damaged archive"),
    "cut.json.xz": (PACKED["t.json.xz"][:-30], "it cannot be unpacked: it is cut off"),
    "bomb.json.xz": (BOMB, "it unpacks to more than 200 times its size"),
    "t.json.zst": (b"\x28\xb5\x2f\xfd\x04\x00", "it is compressed with Zstandard: unpack it first, with zstd -d"),
    "t.lz4": (b"\x04\x22\x4d\x18....", "it is compressed with LZ4"),
    "t.7z": (b"7z\xbc\xaf\x27\x1c..", "it is compressed with 7-Zip"),
    "lfs.json": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n",
        "it is a pointer of Git LFS",
    ),
    "lfs.sqlite": (POINTER, "git lfs pull fetches"),
    "page.json": (
        b"\n\n<!DOCTYPE html>\n<html>",
        "it is an HTML page, such as a login or an error page",
    ),
    "page.sqlite": (b"<html><head>", "it is an HTML page"),
    "denied.json": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "it is XML"),
    "host.xplane.pb": (b"\x0a\x8c\x03\x08\x01\x12\x09/host:CPU\x1a\x00", "it is XProf's .xplane.pb: give"),
    "unnamed": (b"\x0a\xb8\x92\x01\x12\x0d/device:GPU:0\x1a\x00\x08", "it is XProf's .xplane.pb"),
    "t.pftrace": (
        b"\x0a\x0b\x50\x01\x68\x02\x9a\x07\x00\x01\x02",
        "it is a binary trace of Perfetto: traceconv",
    ),
    "t.hatchet": (b'[{"children": [], "frame": {"name": "ROOT"}, "metrics": {}}, {}]', "it is a Hatchet profile"),
    "ort.json": (
        b'[\n{"cat" : "Session","pid" :1,"tid" :2,"dur" :3,"ts" :4,"ph" : "X","name" :"init","args" : {}}\n]',
        "it is a profile of ONNX Runtime",
    ),
    "trt.json": (
        b'[\n  { "count" : 340 }\n, { "name" : "conv1" }\n]',
        "it is a profile of TensorRT",
    ),
    "times.json": (b'[\n  { "startH2dMs" : 1.5, "endH2dMs" : 1.6 }\n]', "it is a profile of TensorRT"),
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
