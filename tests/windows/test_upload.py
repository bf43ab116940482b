"""`upload` copies windows to a remote folder in the background; what fails is said, and the local copy stays."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base.run_folder import entries_of, files_of
from instrument.finish import file_keeping as module
from instrument.finish.file_keeping import FileKeeping, StoredWindows, Upload, Uploader
from instrument.record.handover.storage import Storage, masked

from ..support.finishing import eventually, finishing_pid, unfinished
from .test_retention import write_window
from .training import content, expected, manifest, run, traces, train

pytestmark = pytest.mark.process

fsspec = pytest.importorskip("fsspec")
FLAKY = Path(__file__).parents[1] / "support" / "flaky_filesystem"


def uploads(out: Path) -> list[tuple[int, str]]:
    """Return the window and the status of each upload."""
    return [(line["window"], line["status"]) for line in manifest(out) if line.get("event") == "upload"]


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of orders for the file system "flaky", which fsspec finds here and in the finishing process."""
    folder = tmp_path / "orders"
    folder.mkdir()
    monkeypatch.setenv("FLAKY_ORDERS", str(folder))
    monkeypatch.syspath_prepend(str(FLAKY))
    fsspec.register_implementation("flaky", "flaky_filesystem.FlakyFileSystem", clobber=True)
    return folder


def test_windows_are_copied(out: Path, tmp_path: Path) -> None:
    """The remote folder can be read like the local one, and the manifest says that the upload is done."""
    remote = tmp_path / "remote" / "runs"
    run(out, upload=f"file://{remote}")
    assert [(1, "done"), (2, "done")] == uploads(out)
    for trace in traces(out):
        assert (remote / trace.relative_to(out)).read_bytes() == trace.read_bytes()
    assert list(entries_of(out)) == list(entries_of(remote))
    (copied,) = remote.glob("manifest.*.jsonl")
    assert (out / "manifest.jsonl").read_bytes() == copied.read_bytes()
    assert [6, 7] == instrument.read_trace(next(remote.glob("window-0002/*"))).steps.number.tolist()
    (line,) = [line for line in manifest(out) if line.get("event") == "upload" and line["window"] == 1]
    assert f"file://{remote}" == line["url"]
    assert files_of(line) == [str(trace.relative_to(out)) for trace in traces(out)[:1]]
    assert line["seconds"] > 0


def test_the_log_says_what_was_uploaded(out: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The event has the fields of the line in the manifest."""
    caplog.set_level(logging.INFO, "instrument")
    run(out, upload=f"file://{tmp_path / 'remote'}", schedule="2")
    (line,) = [line for line in manifest(out) if line.get("event") == "upload"]
    (event,) = [record.__dict__ for record in caplog.records if record.__dict__["event"] == "window.upload"]
    same = ("rank", "window", "files", "url", "status", "seconds")
    assert [line[name] for name in same] == [event[name] for name in same]
    assert (1, "done", "INFO") == (event["window"], event["status"], event["levelname"])


def test_a_remote_that_fails_for_a_while(out: Path, tmp_path: Path, orders: Path) -> None:
    """Each file is tried again after a longer and longer delay."""
    for number in range(2):
        (orders / f"fail-{number}").touch()
    run(out, upload=f"flaky://{tmp_path / 'remote'}")
    assert [(1, "done"), (2, "done")] == uploads(out)
    assert 2 == len(list((tmp_path / "remote").glob("window-*/*")))


def test_a_remote_that_keeps_failing(
    out: Path, tmp_path: Path, orders: Path, lenient: None, caplog: pytest.LogCaptureFixture
) -> None:
    """One line is logged, without secrets; the manifest has each window, and no local file goes."""
    for number in range(100):
        (orders / f"fail-{number:02}").touch()
    url = f"flaky://{tmp_path / 'remote'}"
    run(out, upload=url, upload_timeout=4, keep=instrument.keep(windows=1))
    (first, second) = uploads(out)
    assert "failed: the run ended before it was done, within 4 s" == first[1] == second[1]
    assert 2 == len(traces(out))
    assert 1 == sum("uploading windows" in message for message in caplog.messages)


def test_the_files_beside_a_trace_are_uploaded(out: Path, tmp_path: Path) -> None:
    """The remote folder has the diagnosis and its page too."""
    remote = tmp_path / "remote"
    run(out, upload=f"file://{remote}", diagnose=True)

    def names(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.glob("window-*/*")}

    assert names(out) == names(remote)
    assert any(name.endswith(".diagnosis.html") for name in names(remote))


def test_keep_waits_for_the_upload(out: Path, tmp_path: Path, orders: Path) -> None:
    """An old window is removed when its upload is done."""
    (orders / "hang").touch()
    with instrument.profile(
        out,
        schedule=instrument.schedule("1,3,5"),
        upload=f"flaky://{tmp_path / 'remote'}",
        keep=instrument.keep(windows=1),
    ) as prof:
        train(30, prof.step)
        eventually(lambda: 3 == len(list(entries_of(out))))
        assert 3 == len(traces(out))
        (orders / "hang").unlink()
    assert ["window-0003"] == [trace.parent.name for trace in traces(out)]
    assert 3 == len(list((tmp_path / "remote").glob("window-*/*")))
    events = [(line["event"], line["window"]) for line in manifest(out) if "event" in line]
    assert events.index(("upload", 1)) < events.index(("removed", 1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_finishing_process_that_is_killed_in_an_upload(
    out: Path, tmp_path: Path, orders: Path, lenient: None
) -> None:
    """The next one uploads what was left."""
    (orders / "hang").touch()

    def kill(step: int) -> None:
        if step == 30:
            eventually(lambda: (orders / "hangs").exists())
            os.kill(finishing_pid(), signal.SIGKILL)
            eventually(lambda: not unfinished())
            (orders / "hang").unlink()

    schedule = instrument.schedule("1,32")
    with instrument.profile(out, schedule=schedule, upload=f"flaky://{tmp_path / 'remote'}") as prof:
        assert expected(60) == train(60, prof.step, kill)
    assert {(1, "done"), (2, "done")} == set(uploads(out))
    assert 2 == len(list((tmp_path / "remote").glob("window-*/*")))


def test_a_folder_that_is_removed_in_mid_run(out: Path, tmp_path: Path, orders: Path, lenient: None) -> None:
    """A window that is gone is not uploaded, and the next one is."""
    import shutil

    (orders / "hang").touch()

    def remove(step: int) -> None:
        if step == 30:
            eventually(lambda: (orders / "hangs").exists())
            shutil.rmtree(out)
            (orders / "hang").unlink()

    run(out, remove, 60, schedule=instrument.schedule("1,32"), upload=f"flaky://{tmp_path / 'remote'}")
    assert (2, "done") in uploads(out)
    lines = {entry["window"]: entry for entry in entries_of(out)}
    assert lines.pop(2)["files"]
    # The first has a line again if its folder was removed before its answer was seen: a reason, no files
    assert all(entry["reason"] and not entry["files"] for entry in lines.values()), lines


def test_a_remote_that_cannot_be_reached(
    out: Path, monkeypatch: pytest.MonkeyPatch, lenient: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the run waits as long as `upload_timeout` says, and training is the same to the last bit."""
    pytest.importorskip("s3fs")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    credentials(monkeypatch, f"http://127.0.0.1:{port}")
    run(out, upload="s3://bucket/runs", upload_timeout=1)
    assert [1, 2] == [window for window, status in uploads(out) if status.startswith("failed: ")]
    assert 2 == len(traces(out))
    assert all(content(trace)["traceEvents"] for trace in traces(out))
    assert "secret-key" not in caplog.text + (out / "manifest.jsonl").read_text()


def credentials(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "access",
        "AWS_SECRET_ACCESS_KEY": "secret-key",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a server that speaks the protocol of S3."""
    pytest.importorskip("s3fs")
    server_of = pytest.importorskip("moto.server").ThreadedMotoServer
    boto3 = pytest.importorskip("boto3")
    server = server_of(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    credentials(monkeypatch, f"http://{host}:{port}")
    yield boto3.client("s3")
    server.stop()


@pytest.mark.filterwarnings("ignore")
def test_a_bucket_of_s3(out: Path, s3: Any) -> None:
    """Files come before the manifest, and are the same to the last byte."""
    s3.create_bucket(Bucket="bucket")
    run(out, upload="s3://bucket/runs/x")
    assert [(1, "done"), (2, "done")] == uploads(out)
    keys = {item["Key"]: item["LastModified"] for item in s3.list_objects_v2(Bucket="bucket")["Contents"]}
    assert 3 == len(keys)
    for trace in traces(out):
        key = f"runs/x/{trace.relative_to(out)}"
        assert trace.read_bytes() == s3.get_object(Bucket="bucket", Key=key)["Body"].read()
        del keys[key]
    (key,) = keys
    assert key.startswith("runs/x/manifest.")
    assert (out / "manifest.jsonl").read_bytes() == s3.get_object(Bucket="bucket", Key=key)["Body"].read()


@pytest.mark.filterwarnings("ignore")
def test_a_bucket_that_is_not_there(out: Path, s3: Any, lenient: None) -> None:
    """It is not created, and the manifest has the reason."""
    run(out, upload="s3://mistyped/runs/x", upload_timeout=3)
    assert all(status.startswith("failed: ") for _, status in uploads(out))
    assert "mistyped" not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]


@pytest.fixture
def memory() -> Iterator[Any]:
    """The file system in the memory of this process, empty."""
    yield (store := fsspec.filesystem("memory"))
    store.rm("/", recursive=True)


def test_uploads_in_this_process(out: Path, memory: Any) -> None:
    """The lines of another run and of a rank that is still writing stay out of the copied manifest."""
    trace = write_window(out, 1)
    with (out / "manifest.jsonl").open("a") as file:
        file.write('{"run": "other", "rank": 1}\n{"run": "r", "ra')
    (window,) = StoredWindows(out).of_rank(0)
    keeping = FileKeeping(out, "r", Storage(upload="memory://runs/x"))
    assert (None, False) == keeping.end()
    assert trace.read_bytes() == memory.cat(f"/runs/x/{window.paths[0]}")
    lines = memory.cat("/runs/x/manifest.r.jsonl").splitlines()
    assert 2 == len(lines)
    assert b"other" not in b"".join(lines)
    assert [(1, "done")] == [
        (line["window"], line["status"]) for line in module_lines(out) if line.get("event") == "upload"
    ]


def module_lines(out: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a manifest."""
    from instrument.base.run_folder import parse_lines

    return list(parse_lines((out / "manifest.jsonl").read_bytes().splitlines()))


def test_an_uploader_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orders: Path) -> None:
    """What is not done fails, and nothing waits for a connection that hangs."""
    (orders / "hang").touch()
    (tmp_path / "a").write_text("a")
    uploader = Uploader(f"flaky://{tmp_path / 'remote'}")
    for name in ("a", "b"):
        uploader.add(Upload({name: tmp_path / "a"}, dict))
    assert not uploader.wait(time.monotonic() + 0.05)
    uploader.give_up()
    assert [module.TOO_LATE] * 2 == [upload.failure for upload in uploader.take_done()]
    assert uploader.wait(time.monotonic())
    (orders / "hang").unlink()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sftp://user:pass@host/x", "sftp://***@host/x"),
        ("cannot reach sftp://user:pass@host/x: pass", "cannot reach sftp://***@host/x: ***"),
        ("https://host/x?sig=abc&b=c failed", "https://host/x?*** failed"),
        ("s3://bucket/runs/x", "s3://bucket/runs/x"),
    ],
)
def test_secrets_are_masked(text: str, expected: str) -> None:
    """Users, passwords and query parameters are shown nowhere."""
    assert expected == masked(text, "sftp://user:pass@host/x")


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, {"upload": 3}, '"upload" must be a URL such as "s3://bucket/runs/x": 3'),
        (ValueError, {"upload": "runs/x"}, "'runs/x'"),
        (ValueError, {"upload": "nothing://u:p@x"}, "'nothing://***@x'"),
        (ValueError, {"upload_timeout": 0}, '"upload_timeout" must be a number of seconds from 0 to 600: 0'),
        (TypeError, {"upload_timeout": "1"}, "\"upload_timeout\" must be a number of seconds from 0 to 600: '1'"),
        (ValueError, {"out": "s3://bucket/x"}, "\"upload\" copies it: upload='s3://bucket/x'"),
    ],
)
def test_arguments_that_are_not_accepted(error: type[Exception], arguments: dict[str, Any], message: str) -> None:
    """The call of `profile` raises, and says what is accepted."""
    with pytest.raises(error) as caught:
        instrument.profile(**arguments)
    assert message in str(caught.value)


def test_no_password_in_the_folder_of_the_run(
    out: Path, tmp_path: Path, orders: Path, lenient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of the run has the password of the URL, not even while windows are finished."""
    monkeypatch.chdir(tmp_path)  # the user and the password are a folder for this file system
    (orders / "hang").touch()
    url = f"flaky://user:s3cretpw@{tmp_path / 'remote'}"
    with instrument.profile(out, schedule=instrument.schedule("1"), upload=url) as prof:
        train(30, prof.step)
        eventually(lambda: (orders / "hangs").exists())
        jobs = list(out.glob(".*.jobs/jobs"))
        found = [path for path in out.rglob("*") if path.is_file() and b"s3cretpw" in path.read_bytes()]
        (orders / "hang").unlink()
    assert (1, []) == (len(jobs), found)
