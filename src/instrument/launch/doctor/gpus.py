"""Which GPUs are here, and whether torch can use them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping

from .check import Check
from .machine import Machine

ANOTHER = "end what uses it, or choose one that is free: CUDA_VISIBLE_DEVICES=1 instrument doctor"
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def gpus(machine: Machine) -> Check:
    """Which GPUs torch can use, with which driver."""
    names, driver = Counter(machine.torch.gpus), _driver(machine)
    facts = {"gpus": list(machine.torch.gpus), "driver": driver}
    of_driver = f", NVIDIA driver {driver}" if driver else ""
    if names:
        listed = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
        if machine.torch.why_no_gpu:
            sentence = f"{listed}{of_driver}; the first cannot be used now: {machine.torch.why_no_gpu}"
            return Check("note", sentence, ANOTHER, facts)
        return Check("ok", listed + of_driver, facts=facts)
    if machine.nvidia:
        return _unused(machine, f"NVIDIA{of_driver}", facts)
    if machine.amd:
        return _unused(machine, "AMD", facts)
    if driver:
        sentence = f"none that can be opened from here, with NVIDIA driver {driver}"
        return Check("note", sentence, "docker run --gpus all" if machine.container else "nvidia-smi", facts)
    return Check("absent", "none", facts=facts)


def _unused(machine: Machine, gpu: str, facts: Mapping[str, object]) -> Check:
    """Why torch can use none, although there is one."""
    torch = machine.torch
    hidden = [f"{name}={os.environ[name]}" for name in _HIDING if os.environ.get(name) in ("", "-1")]
    if hidden:
        return Check("note", f"{gpu}; hidden by {', '.join(hidden)}", facts=facts)
    if not torch.version:
        return Check("note", f"{gpu}; not examined, as torch cannot be used", facts=facts)
    if machine.nvidia and not torch.cuda:
        cure = "pip install --force-reinstall torch"
        return Check("problem", f"{gpu}; torch is built without CUDA and does not use it", cure, facts)
    if not machine.nvidia and not torch.rocm:  # many a processor has one in it that nobody means to compute on
        cure = "torch for ROCm: https://pytorch.org/get-started/locally"
        return Check("note", f"{gpu}; torch is built without ROCm and does not use it", cure, facts)
    why = torch.why_no_gpu or torch.failure or "it does not say why"
    cure = "a driver as new as the CUDA of torch, or a torch for this driver"
    if not machine.nvidia:
        cure = "sudo usermod -a -G render,video $USER, then log in again"
    return Check("problem", f"{gpu}; torch cannot use it: {why}", cure, facts)


def _driver(machine: Machine) -> str:
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", machine.text("proc/driver/nvidia/version"))
    return found[0] if found else ""
