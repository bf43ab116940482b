"""Checks of installed software and of viewers."""

from __future__ import annotations

import http.server
import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from instrument.start.doctor import profilers, software
from instrument.start.doctor.machine import Machine, Status
from instrument.start.doctor.report import examine, render
from instrument.start.doctor.trials import TorchTrial
from tests.launch.doctor.support import CPU, CUDA, FULL, ROCM, install, put, summary

pytestmark = pytest.mark.vendor


def test_nothing_installed(machine: Machine, tools: Callable[..., Path]) -> None:
    """Missing parts are not problems: without torch, traces can be read."""
    machine.torch = TorchTrial(failure="import torch ended with code 1")
    machine.viewer = "http://127.0.0.1:1"
    found = list(examine(machine))
    statuses = {item.name: item.check.status for item in found}
    assert "problem" not in statuses.values()
    absent = {name for name, status in statuses.items() if status == "absent"}
    tools_and_viewers = {"nsys", "nvtx", "ncu", "rocprof", "vtune", "TensorBoard"}
    assert {"torch", "torch.profiler", "GPU", "frameworks"} | tools_and_viewers == absent
    assert "pip install torch" in software.torch(machine).sentence
    shown = io.StringIO()
    render(found, console=Console(file=shown, width=100))
    assert "No problem, 1 note: traces can be read here; recording needs torch." in shown.getvalue()


def test_torch_that_cannot_be_imported(machine: Machine) -> None:
    """It is a problem, unlike a torch that is not installed."""
    machine.torch = TorchTrial(failure="import torch ended with code 1")
    install(machine, "torch", "2.13.0")
    check = software.torch(machine)
    assert "problem" == check.status
    assert "import torch ended with code 1" in check.sentence
    assert "note" == profilers.torch_profiler(machine).status


@pytest.mark.parametrize(
    "trial, status, words",
    [
        (CPU, "ok", "2.13.0+cpu, built for the CPU"),
        (CUDA, "ok", "built for CUDA 13.0"),
        (ROCM, "note", "torch.cuda.profiler.start() does nothing"),
        (TorchTrial(version="2.5.1"), "problem", "older than 2.6"),
        (TorchTrial(version="2.10.0a0+git1"), "ok", "2.10.0a0+git1"),
    ],
)
def test_torch(machine: Machine, trial: TorchTrial, status: Status, words: str) -> None:
    """The build and the age of torch are checked."""
    machine.torch = trial
    check = software.torch(machine)
    assert status == check.status
    assert words in check.sentence


DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (root@x)"


NO_CUDA = TorchTrial(version="2.13.0+cu130", cuda="13.0", why_no_gpu="The NVIDIA driver is too old")


@pytest.mark.parametrize(
    "device, trial, env, expected",
    [
        ("dev/nvidiactl", CUDA, {}, ("ok", "H100, NVIDIA driver 570.124.06")),
        ("dev/nvidiactl", CPU, {}, ("problem", "torch is built without CUDA")),
        ("dev/nvidiactl", FULL, {}, ("note", "2 x H100, NVIDIA driver 570.124.06; the first cannot be used now")),
        ("dev/nvidiactl", NO_CUDA, {}, ("problem", "torch cannot use it: The NVIDIA driver is too old")),
        ("dev/nvidiactl", NO_CUDA, {"CUDA_VISIBLE_DEVICES": ""}, ("note", "hidden by CUDA_VISIBLE_DEVICES")),
        ("dev/nvidiactl", TorchTrial(failure="x"), {}, ("note", "not checked")),
        ("dev/null", NO_CUDA, {}, ("note", "none can be opened from here")),
        ("dev/kfd", CPU, {}, ("note", "torch is built without ROCm")),
        ("dev/kfd", TorchTrial(version="2.13.0", rocm="7.0"), {}, ("problem", "torch cannot use it")),
    ],
)
def test_gpus(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    trial: TorchTrial,
    env: dict[str, str],
    expected: tuple[str, str],
) -> None:
    """A GPU that torch does not use is reported, with the reason."""
    put(machine, device)
    put(machine, "proc/driver/nvidia/version", DRIVER)
    machine.torch = trial
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    check = software.gpus(machine)
    assert expected[0] == check.status
    assert expected[1] in check.sentence
    assert ("problem" != check.status) or check.fix


def test_many_gpus(machine: Machine) -> None:
    """Equal GPUs are counted."""
    machine.torch = TorchTrial(version="2.13.0", cuda="13.0", gpus=("H100",) * 8 + ("T4",))
    assert "8 x H100, T4" == software.gpus(machine).sentence


def test_frameworks(machine: Machine) -> None:
    """Versions are read without an import."""
    install(machine, "transformers", "5.23.0")
    install(machine, "megatron-core", "0.16.1")
    check = software.frameworks(machine)
    assert check.sentence.startswith("transformers 5.23.0, megatron-core 0.16.1; not installed: accelerate")
    assert "5.23.0" == check.facts["transformers"]


class NotFoundHandler(http.server.BaseHTTPRequestHandler):
    """Answers every request with 404."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), NotFoundHandler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()
        thread.join()


def test_perfetto(machine: Machine, server: str) -> None:
    """Any response is enough; no response is a note."""
    machine.viewer = server
    assert ("ok", f"{server} can be reached", "") == summary(software.perfetto(machine))
    for silent in ("http://127.0.0.1:1", "nonsense", "http://nowhere.invalid"):
        machine.viewer = silent
        assert ("note", False) == (
            software.perfetto(machine).status,
            software.perfetto(machine).facts["reachable"],
        )


def test_a_network_that_is_silent(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts the connection and never answers is abandoned after the limit."""
    monkeypatch.setattr(software, "_VIEWER_LIMIT_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        machine.viewer = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert "note" == software.perfetto(machine).status


def test_slow_name_lookup(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name lookup, which has no time limit of its own, is abandoned after the limit too."""
    monkeypatch.setattr(software, "_VIEWER_LIMIT_S", 0.2)
    given_up, answers = threading.Event(), []

    def getaddrinfo(*_: object, **__: object) -> list[object]:
        given_up.wait(30)
        answers.append(given_up.is_set())
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert "note" == software.perfetto(machine).status
    assert [] == answers
    given_up.set()


def test_tensorboard(machine: Machine) -> None:
    """The plugin without TensorBoard is a problem."""
    install(machine, "torch-tb-profiler", "0.4.3")
    assert "pip install tensorboard" == software.tensorboard(machine).fix
    install(machine, "tensorboard", "2.21.0")
    assert "ok" == software.tensorboard(machine).status
