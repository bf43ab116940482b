"""Checks of what is installed: this library, Python, torch, GPUs, frameworks and viewers."""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from urllib.error import HTTPError

from ... import __version__
from .machine import Check, Machine

OLDEST_TORCH = (2, 6)
FRAMEWORKS = (
    *("transformers", "accelerate", "lightning", "pytorch-lightning", "megatron-core"),
    *("deepspeed", "torchtitan", "vllm"),
)
USE_ANOTHER_GPU = "end what uses it, or choose a free one: CUDA_VISIBLE_DEVICES=1 instrument doctor"
_HIDING_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_VIEWER_LIMIT_S = 2.0


def instrument(machine: Machine) -> Check:
    """Return the release of this library, and its folder."""
    folder = Path(__file__).parents[2]
    return Check("ok", f"{__version__}, {folder}", facts={"version": __version__, "folder": str(folder)})


def python(machine: Machine) -> Check:
    """Return the Python that runs."""
    version = platform.python_version()
    system = f"{platform.system()} {platform.machine()}"
    sentence = f"{platform.python_implementation()} {version}, {system}, {sys.executable}"
    return Check("ok", sentence, facts={"version": version, "executable": sys.executable})


def torch(machine: Machine) -> Check:
    """Check that torch can be imported and is new enough; return what it is built for."""
    trial = machine.torch
    if not trial.version:
        if not machine.package("torch"):
            sentence = f"not installed: traces can be read here; to record, {sys.executable} -m pip install torch"
            return Check("absent", sentence)
        fix = f"{sys.executable} -c 'import torch' shows the error"
        return Check("problem", f"{machine.package('torch')} cannot be used: {trial.failure}", fix)
    built = f"CUDA {trial.cuda}" if trial.cuda else f"ROCm {trial.rocm}" if trial.rocm else "the CPU"
    sentence = f"{trial.version}, built for {built}"
    facts = {"version": trial.version, "cuda": trial.cuda, "rocm": trial.rocm}
    if tuple(int(part) for part in re.findall(r"\d+", trial.version)[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        fix = f"pip install 'torch>={oldest}'"
        return Check("problem", f"{sentence}: older than {oldest}, which this library needs", fix, facts)
    if trial.rocm:
        sentence += "; its torch.cuda.profiler.start() does nothing"
        return Check("note", sentence, "instrument run --profiler rocprof", facts)
    return Check("ok", sentence, facts=facts)


def gpus(machine: Machine) -> Check:
    """Return the GPUs that torch can use, and the driver."""
    names, driver = Counter(machine.torch.gpus), _driver(machine)
    facts = {"gpus": list(machine.torch.gpus), "driver": driver}
    with_driver = f", NVIDIA driver {driver}" if driver else ""
    if names:
        listed = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
        if machine.torch.why_no_gpu:
            sentence = f"{listed}{with_driver}; the first cannot be used now: {machine.torch.why_no_gpu}"
            return Check("note", sentence, USE_ANOTHER_GPU, facts)
        return Check("ok", listed + with_driver, facts=facts)
    if machine.nvidia:
        return _unused_gpu(machine, f"NVIDIA{with_driver}", facts)
    if machine.amd:
        return _unused_gpu(machine, "AMD", facts)
    if driver:
        sentence = f"none can be opened from here, although NVIDIA driver {driver} is loaded"
        return Check("note", sentence, "docker run --gpus all" if machine.container else "nvidia-smi", facts)
    return Check("absent", "none", facts=facts)


def _unused_gpu(machine: Machine, gpu: str, facts: Mapping[str, object]) -> Check:
    """Return why torch can use no GPU, although there is one."""
    torch = machine.torch
    hidden = [f"{name}={os.environ[name]}" for name in _HIDING_VARIABLES if os.environ.get(name) in ("", "-1")]
    if hidden:
        return Check("note", f"{gpu}; hidden by {', '.join(hidden)}", facts=facts)
    if not torch.version:
        return Check("note", f"{gpu}; not checked, as torch cannot be used", facts=facts)
    if machine.nvidia and not torch.cuda:
        fix = "pip install --force-reinstall torch"
        return Check("problem", f"{gpu}; torch is built without CUDA and does not use it", fix, facts)
    if not machine.nvidia and not torch.rocm:  # a note: many processors contain a small AMD GPU
        fix = "torch for ROCm: https://pytorch.org/get-started/locally"
        return Check("note", f"{gpu}; torch is built without ROCm and does not use it", fix, facts)
    why = torch.why_no_gpu or torch.failure or "it gives no reason"
    fix = "a driver as new as the CUDA of torch, or a torch for this driver"
    if not machine.nvidia:
        fix = "sudo usermod -a -G render,video $USER, then log in again"
    return Check("problem", f"{gpu}; torch cannot use it: {why}", fix, facts)


def _driver(machine: Machine) -> str:
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", machine.text("proc/driver/nvidia/version"))
    return version[0] if version else ""


def frameworks(machine: Machine) -> Check:
    """Return the installed frameworks."""
    versions = {name: machine.package(name) for name in FRAMEWORKS}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not listed:
        return Check("absent", f"none of {', '.join(FRAMEWORKS)}", facts=versions)
    missing = [name for name, version in versions.items() if not version]
    return Check("ok", listed + (f"; not installed: {', '.join(missing)}" if missing else ""), facts=versions)


def perfetto(machine: Machine) -> Check:
    """Check that Perfetto can be reached; traces can also be opened on another machine."""
    reachable = _is_reachable(machine.viewer)
    facts = {"reachable": reachable}
    if reachable:
        return Check("ok", f"{machine.viewer} can be reached", facts=facts)
    sentence = f"{machine.viewer} cannot be reached from here: open traces on a machine with a browser"
    return Check("note", sentence, facts=facts)


def _is_reachable(address: str) -> bool:
    answered = threading.Event()

    def request() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_VIEWER_LIMIT_S).close()
        except HTTPError as error:
            error.close()  # also an answer
        except (OSError, ValueError):
            return
        answered.set()

    # A thread, because looking up a name has no time limit and takes half a minute without a network.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(_VIEWER_LIMIT_S)
    return answered.is_set()


def tensorboard(machine: Machine) -> Check:
    """Check that TensorBoard can show traces of torch.profiler."""
    plugin, version = machine.package("torch-tb-profiler"), machine.package("tensorboard")
    facts = {"tensorboard": version, "torch_tb_profiler": plugin}
    if plugin and version:
        return Check("ok", f"tensorboard {version} with torch-tb-profiler {plugin}", facts=facts)
    if plugin:
        sentence = f"torch-tb-profiler {plugin} without TensorBoard"
        return Check("problem", sentence, "pip install tensorboard", facts)
    sentence = "torch-tb-profiler is not installed; pip install tensorboard torch-tb-profiler"
    return Check("absent", sentence, facts=facts)
