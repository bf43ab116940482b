"""The process behind `tests.support.warm`: imports torch, then forks a child for each program.

Each request is a line of JSON on the socket that the first argument names: ``command``, ``env``, ``cwd``, the
files for standard input, output and error, and the number of ``ranks``, 0 for a single process. The answers are
the ``process`` number of the child and its exit ``status``. `instrument run` becomes the program that it starts:
its child ends, and the next one is the program. A request with an ``address`` starts a further server, which
imports the packages ``imports`` and takes its requests from the socket there.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it
import typer
import wrapt  # noqa: F401

_command = typer.Typer()
_command.command()(lambda: None)
_command([], standalone_mode=False)  # imports what typer does with its first command: 0.1 s
gc.collect()
gc.freeze()  # a collection in a child, as at its end, would copy every page of torch's objects: 0.8 s
_PATH = sys.path[2:]  # without the folder of this file and the current one


def program() -> CodeType:
    """Serve requests until the connection ends; in a child, return the code that it is to run as ``__main__``."""
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile() as requests:
        for line in requests:
            request = json.loads(line)
            if address := request.get("address"):
                if not os.fork():
                    return _further(address, request["imports"])
                continue
            if request["command"][1:4] == ["-m", "instrument", "run"]:
                read, write = os.pipe()
                child = os.fork()
                if not child:
                    return _launcher(request, write)
                os.close(write)
                status = _wait(child, connection)
                with os.fdopen(read) as replacement:
                    text = replacement.read()
                if not text:  # it has ended without starting a program
                    _answer(connection, status=status)
                    continue
                request |= json.loads(text)
            child = os.fork()
            if not child:
                return _program(request)
            _answer(connection, status=_wait(child, connection))
    os._exit(0)


def _further(address: str, imports: list[str]) -> CodeType:
    """Serve requests as a process that has imported more packages."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    sys.argv[1] = str(connection.detach())
    return program()


def _wait(child: int, connection: socket.socket) -> int:
    _answer(connection, process=child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _answer(connection: socket.socket, **answer: int) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _launcher(request: dict[str, Any], write: int) -> CodeType:
    """Return the code of ``instrument run``, for which starting the program is to write it into ``write``."""

    def execvpe(_: str, command: list[str], env: dict[str, str]) -> None:
        os.write(write, json.dumps({"command": command, "env": dict(env)}).encode())
        sys.stdout.flush()
        os._exit(0)

    _enter(request, ["instrument", *request["command"][3:]])
    os.execvpe = execvpe  # type: ignore[assignment]
    return compile("from instrument.start.cli import main\nmain()", "<instrument>", "exec")


def _program(request: dict[str, Any]) -> CodeType:
    """Return the code of the program in ``request``."""
    command, env = request["command"], request["env"]
    if "INSTRUMENT_RUN_PROCESS" in env:  # the launcher becomes the program
        env["INSTRUMENT_RUN_PROCESS"] = str(os.getpid())
    if ranks := request["ranks"]:
        env |= _rank(ranks, Path(request["stderr"]))
    _enter(request, command[1:])
    if command[1] == "-c":
        sys.path.insert(0, "")
        return compile(command[2], "<string>", "exec")
    if command[1] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(command[2])
        sys.exit()
    path = Path(command[1]).absolute()
    sys.path.insert(0, str(path.resolve().parent))
    vars(sys.modules["__main__"]).update(__file__=str(path), __cached__=None)
    return compile(path.read_text(encoding="utf-8"), str(path), "exec")


def _rank(ranks: int, errors: Path) -> dict[str, str]:
    """Start a process for each rank; return its variables there, as torchrun sets them.

    This process waits for them, writes a line into ``errors`` for each that fails, and ends with the code of the
    first of these.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if not process:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            numbers["MASTER_PORT"] = port
            return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}
        processes.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    with errors.open("a") as lines:
        lines.writelines(f"rank {rank} ended with {code}\n" for rank, code in enumerate(codes) if code)
    os._exit(next((abs(code) for code in codes if code), 0))


def _enter(request: dict[str, Any], arguments: list[str]) -> None:
    """Make this child what a new process of Python is at its start."""
    for number, (name, flags) in enumerate(
        [("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY | os.O_APPEND), ("stderr", os.O_WRONLY | os.O_APPEND)]
    ):
        file = os.open(request[name], flags)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if simulated := sys.modules.get("simgpu_boot"):
        simulated.renew()
    if threads := os.environ.get("OMP_NUM_THREADS"):  # read when torch was imported
        torch.set_num_threads(int(threads))
    sys.argv[:] = arguments[:1] + arguments[2:] if arguments[0] in ("-c", "-m") else arguments
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_PATH]
    sys.path_importer_cache.clear()
    sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    main = vars(sys.modules["__main__"])
    for name in set(main) - {"__name__", "__builtins__", "__doc__", "__loader__", "__spec__", "__package__"}:
        del main[name]
    main["__annotations__"] = {}
