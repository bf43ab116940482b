"""A simulated CUDA build with one GPU, which records each call that reaches it, for programs in a process.

The folder that `install` creates goes first on ``PYTHONPATH``. Only calls made by this library are recorded,
not those of the program.
"""

from __future__ import annotations

from pathlib import Path

_SITE = """
import os, sys, traceback
import wrapt

OURS = os.sep + os.path.join("instrument", "")
FOLDER = os.path.dirname(os.path.abspath(__file__))


def note(name):
    stack = traceback.extract_stack()
    if any(OURS in frame.filename for frame in stack):
        line = name + " <- " + " <- ".join(f"{f.filename}:{f.lineno}" for f in stack[-8:-1]) + "\\n"
        with open(os.path.join(FOLDER, "noted"), "a") as file:
            file.write(line)


def noting(name, answer):
    def call(*args, **kwargs):
        note(name)
        return answer(*args, **kwargs) if callable(answer) else answer
    return call


def pretend(torch):
    import torch.autograd.profiler, torch.profiler

    torch.version.cuda = "13.0"
    for name, answer in {
        "_cuda_getDeviceCount": 1, "_cuda_init": None, "_cuda_getDevice": 0, "_cuda_setDevice": None,
        "_cuda_synchronize": None, "_cuda_getCurrentRawStream": 0, "_cuda_isInBadFork": False,
    }.items():
        setattr(torch._C, name, noting(name, answer) if name != "_cuda_isInBadFork" else lambda: False)
    for name in ("is_available", "device_count", "_lazy_init", "synchronize", "current_device"):
        setattr(torch.cuda, name, noting(name, getattr(torch.cuda, name)))
    activities = torch.profiler.ProfilerActivity
    supported = noting("_supported_activities", {activities.CPU, activities.CUDA})
    torch.autograd._supported_activities = torch.autograd.profiler._supported_activities = supported


wrapt.register_post_import_hook(pretend, "torch")
"""


def install(folder: Path) -> Path:
    """Create a folder for ``PYTHONPATH`` in ``folder``, and return it."""
    site = folder / "counted"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    return site


def noted(site: Path) -> list[str]:
    """Return the calls so far, each with its call site."""
    path = site / "noted"
    return path.read_text().splitlines() if path.exists() else []
