"""`instrument mcp` as an agent starts it: a process that speaks the protocol on standard input and output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

import anyio
from mcp import Client
from mcp.client.stdio import StdioServerParameters

from instrument.start.agent import server
from tests.agents.client import reply

pytestmark = pytest.mark.process

GPU_TRACE = Path(__file__).parents[1] / "data" / "gpu_two_steps.json"
COMMAND = [sys.executable, "-m", "instrument", "mcp"]


def talk(
    folder: Path, conversation: Callable[[Client], Awaitable[None]], *options: str, mode: str = "auto"
) -> None:
    """Start the command for a folder, and talk to it."""
    command, *arguments = [*COMMAND, str(folder), *options]
    parameters = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))

    async def run() -> None:
        with anyio.fail_after(60):
            async with Client(parameters, mode=mode) as client:
                await conversation(client)

    anyio.run(run)


def large_trace(path: Path, events: int = 400_000) -> None:
    """Write a trace that takes about a second to read."""
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        file.writelines(
            f'{{"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": {number}, "dur": 1}},\n'
            for number in range(events)
        )
        file.write('{"ph": "X", "cat": "cpu_op", "name": "end", "pid": 1, "tid": 1, "ts": 1000000, "dur": 1}]}')


def test_nothing_is_made_for_folders_that_do_not_exist(tmp_path: Path) -> None:
    """The folder to write into is made once the others were checked."""
    made = subprocess.run(
        [*COMMAND, str(tmp_path / "nowhere"), "--out", str(tmp_path / "new")], capture_output=True, text=True
    )
    assert made.returncode
    assert "not a folder" in made.stderr
    assert not (tmp_path / "new").exists()


def test_copies_of_an_archive_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was unpacked is removed under the guard of files, too, also from folders in the archive."""
    for name in ("served", "copies", "elsewhere"):
        (tmp_path / name).mkdir()
    with zipfile.ZipFile(tmp_path / "served" / "runs.zip", "w") as archive:
        archive.writestr("a/b/t.json", "no trace")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "copies"))
    monkeypatch.chdir(tmp_path / "elsewhere")

    async def conversation(client: Client) -> None:
        assert "cannot be read" in reply(await client.call_tool("diagnose", {"trace": "runs.zip"})).text

    talk(tmp_path / "served", conversation)
    assert not list((tmp_path / "copies").glob("instrument-*"))


def test_conversation(tmp_path: Path) -> None:
    """A client with the older handshake, too, lists the tools and gets the same answer as text and as data.

    Archives, pages, and the ranks of a job, which children read, need files beside those that are served.
    """
    shutil.copy(GPU_TRACE, tmp_path)
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        shutil.copy(GPU_TRACE, tmp_path / "ranks" / f"rank{rank}.json")
    with zipfile.ZipFile(tmp_path / "trace.zip", "w") as archive:
        archive.write(GPU_TRACE, "trace.json")
    out = tmp_path / "new" / "out"

    async def conversation(client: Client) -> None:
        assert client.instructions == server.INSTRUCTIONS
        assert "query" in [tool.name for tool in (await client.list_tools()).tools]
        answer = reply(await client.call_tool("diagnose", {"trace": GPU_TRACE.name}))
        assert answer.data["data"]["steps"] == 2
        assert reply(await client.call_tool("diagnose", {"trace": "/etc/hostname"})).refused
        packed = reply(await client.call_tool("diagnose", {"trace": "trace.zip", "page": "page.html"}))
        assert packed.data["data"]["step_ns"] == answer.data["data"]["step_ns"]
        job = reply(await client.call_tool("diagnose", {"trace": "ranks", "show": ["job"]}))
        assert job.data["data"]["job"]["ranks"] == [0, 1]

    talk(tmp_path, conversation, "--out", str(out), mode="legacy")
    assert "<html" in (out / "page.html").read_text()


def test_several_calls_progress_and_cancellation(tmp_path: Path) -> None:
    """Two questions at once get the same answer, a short one need not wait, and reading reports its bytes.

    After a request was cancelled while it read a file, the server answers the next one.
    """
    large_trace(tmp_path / "large.json", 200_000)
    large_trace(tmp_path / "larger.json", 1_000_000)
    size = (tmp_path / "larger.json").stat().st_size
    shutil.copy(GPU_TRACE, tmp_path)
    done: list[str] = []
    reports: list[tuple[float, float | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        reports.append((progress, total))

    async def conversation(client: Client) -> None:
        async def ask(trace: str) -> None:
            answer = reply(await client.call_tool("query", {"trace": trace, "table": "operators", "limit": 1}))
            assert not answer.refused, answer.text
            done.append(answer.text)

        await ask(GPU_TRACE.name)  # imports what answers need
        async with anyio.create_task_group() as group:
            for trace in ("large.json", "large.json", GPU_TRACE.name):
                group.start_soon(ask, trace)
        assert done[1] == done[0]
        assert done[2] == done[3]

        cancelled = anyio.CancelScope()

        async def cancel_once_it_reads() -> None:
            while not reports:
                await anyio.sleep(0.01)
            cancelled.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(cancel_once_it_reads)
            with cancelled:
                await client.call_tool("diagnose", {"trace": "larger.json"}, progress_callback=note)
        assert cancelled.cancelled_caught
        await ask(GPU_TRACE.name)
        assert done[4] == done[0]

    talk(tmp_path, conversation)
    assert all(0 < read < size and total == size for read, total in reports)


def test_only_the_protocol_is_on_standard_output(tmp_path: Path) -> None:
    """Each line on standard output is a message of JSON-RPC, whatever the library prints or logs."""
    (tmp_path / "rules.py").write_text("print('a rule prints')\n")
    entry_points = tmp_path / "prints-1.dist-info"
    entry_points.mkdir()
    (entry_points / "METADATA").write_text("Metadata-Version: 2.1\nName: prints\nVersion: 1\n")
    (entry_points / "entry_points.txt").write_text("[instrument.rules]\nprints = rules\n")
    served = tmp_path / "served"
    served.mkdir()
    shutil.copy(GPU_TRACE, served)
    start = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    messages = [
        {"id": 1, "method": "initialize", "params": start},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "diagnose", "arguments": {"trace": GPU_TRACE.name}}},
        {"id": 3, "method": "no/such/method"},
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [*COMMAND, str(served)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        for message in messages:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        process.stdin.flush()
        replies = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdin.close()
        rest, printed = process.stdout.read(), process.stderr.read()
    assert {each["id"] for each in replies} == {1, 2, 3}
    assert all(each["jsonrpc"] == "2.0" for each in replies)
    assert rest == b""
    assert b"a rule prints" in printed


GUARDED = """
import sys
from pathlib import Path
from instrument.start.agent.folders import ServedFolders, install_guard
served, outside, out = map(Path, sys.argv[1:])
install_guard()
with ServedFolders([served], out).guarding():
    print((served / "inside.txt").read_text())
    (out / "new.txt").write_text("written")
    for path, mode in ((outside / "secret.txt", "r"), (served / "link.txt", "r"), (served / "inside.txt", "w"),
                       (outside / "new.txt", "w"), (Path("/proc/self/environ"), "r")):
        try:
            path.open(mode)
        except PermissionError as error:
            print("refused", mode)
    print([*outside.glob("*")])
    import wave
print((outside / "secret.txt").read_text())
"""


def test_nothing_else_is_opened(tmp_path: Path) -> None:
    """While an answer is made, no code of the process opens or lists what is not served, also through a link."""
    served, outside, out = (tmp_path / name for name in ("served", "outside", "out"))
    for folder in (served, outside, out):
        folder.mkdir()
    (served / "inside.txt").write_text("inside")
    (outside / "secret.txt").write_text("secret")
    (served / "link.txt").symlink_to(outside / "secret.txt")
    run = subprocess.run(
        [sys.executable, "-c", GUARDED, served, outside, out], capture_output=True, text=True, check=True
    )
    refused = ["refused r", "refused r", "refused w", "refused w", "refused r"]
    assert run.stdout.splitlines() == ["inside", *refused, "[]", "secret"]


def test_files_beside_a_served_folder_are_not_read(tmp_path: Path) -> None:
    """The manifest above a served window is not read; with the run served, it is."""
    window = tmp_path / "run" / "window-0001"
    window.mkdir(parents=True)
    trace = window / "rank0.1.pt.trace.json"
    shutil.copy(GPU_TRACE, trace)
    line = {"run": "r", "rank": 0, "window": 1, "status": "recorded", "steps": [5, 6], "end_ns": 1, "phase": None}
    line |= {"files": [{"path": f"window-0001/{trace.name}", "bytes": 1}]}
    timing = {"recorded_ns": 2_000_000, "around_ns": 500_000, "around_each_ns": [500_000] * 9, "run_steps": 20}
    timing |= {"around_steps": [[0, 4], [7, 10]], "run_ns": 20_000_000, "own_ns": 0}
    (tmp_path / "run" / "manifest.jsonl").write_text(json.dumps(line | {"timing": timing}) + "\n")
    found: dict[str, Any] = {}

    async def conversation(client: Client) -> None:
        answer = reply(await client.call_tool("diagnose", {"trace": trace.name if found else str(trace)}))
        found[str(len(found))] = answer.data["window"]["recording_stretched_steps"]

    talk(tmp_path / "run", conversation)
    talk(window, conversation)
    assert found["0"] is not None
    assert found["1"] is None


def test_command(tmp_path: Path) -> None:
    """--skill prints the guide; without folders, or with one that is none, the command says what is missing."""
    guide = subprocess.run([*COMMAND, "--skill"], capture_output=True, text=True, check=True).stdout
    assert guide.startswith("---\nname: ")
    for arguments, said in (([], "give the folders"), ([str(tmp_path / "none")], "not a folder")):
        run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
        assert run.returncode == 2
        assert said in run.stderr
        assert not run.stdout
