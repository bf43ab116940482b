"""Whose functions were on the Python stack, from the words by which a trace calls them."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

import numpy as np

from ..traces.trace import Trace
from . import definitions, sites
from .finding import Site

_FRAME = re.compile(r"^(?P<file>[^<].*)\((?P<line>\d+)\): (?P<function>.+)$")
_BUILT_IN = re.compile(r"^<built-in (?:method|function) (?P<function>\w+)")
_LONGEST = 2048  # of a word: a trace may hold anything
_PROFILER = ("torch/profiler/profiler.py", "torch/autograd/profiler.py")
# Packages whose paths are not known here when a trace comes from another machine, written without what is before
_PACKAGES = frozenset((
    "accelerate", "apex", "bitsandbytes", "composer", "datasets", "deepspeed", "diffusers", "einops", "evaluate",
    "flash_attn", "ignite", "jax", "keras", "lightning", "lightning_fabric", "megatron", "numpy", "pandas", "peft",
    "PIL", "pytorch_lightning", "ray", "sklearn", "scipy", "sentence_transformers", "sglang", "timm", "tokenizers",
    "torch", "torchaudio", "torchmetrics", "torchrec", "torchtitan", "torchtune", "torchvision", "tqdm",
    "transformer_engine", "transformers", "triton", "trl", "vllm", "wandb", "xformers",
))  # fmt: skip


class Functions:
    """Makes sites of the words that torch.profiler writes for Python functions, such as ``train.py(12): main``.

    The number is the line at which the function was when the profiler first saw it: the first line of its
    definition, or where it stood when the recording began. It is not the line of the call that waited: a site
    has that line where the source is here, and has one call alone of what was called, else 0. Where a file that
    is not here has several functions of one name, as ``forward``, the number becomes part of the name.
    """

    def __init__(self, trace: Trace) -> None:
        self._lines: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._paths: dict[str, str] = {}
        for code in np.unique(trace.frames.name).tolist():
            if found := _FRAME.match(trace.strings[code]):
                self._lines[found["file"], found["function"]].add(found["line"])

    def place(self, stack: list[str]) -> tuple[Site | None, Site | None, bool | None]:
        """Return the user's function and the library's of a stack, and if it is the profiler's.

        Args:
            stack: the words, innermost first; without any, nothing is known.
        """
        site = via = None
        frames = [
            (found, stack[row - 1] if row else "")
            for row, name in enumerate(stack)
            if (found := _FRAME.match(name[:_LONGEST]))
        ]
        for frame, inner in frames:
            whose = sites.kind(self._path(frame["file"]))
            if whose == sites.USER:
                site = self._defined(frame, inner)
                break
            if whose == sites.LIBRARY and via is None:
                via = self._recorded(frame)
        profiler = any(frame["file"].replace("\\", "/").endswith(_PROFILER) for frame, _ in frames)
        return site, via, profiler if stack else None

    def _defined(self, frame: re.Match[str], inner: str) -> Site:
        called = _BUILT_IN.match(inner) or _FRAME.match(inner[:_LONGEST])
        path, number = self._path(frame["file"]), int(frame["line"])
        found = definitions.find(path, frame["function"], number, called["function"] if called else None)
        return Site(path, found[1], found[0]) if found else self._recorded(frame)

    def _recorded(self, frame: re.Match[str]) -> Site:
        file, function = frame["file"], frame["function"]
        several = len(self._lines[file, function]) > 1
        return Site(file, 0, f"{function} (line {frame['line']})" if several else function)

    def _path(self, file: str) -> str:
        if file not in self._paths:
            self._paths[file] = _whole(file)
        return self._paths[file]


def _whole(file: str) -> str:
    """The path of a file, from which torch.profiler takes the beginning that is in ``sys.path``.

    What is not found here is put among the installed packages if it is of a package that is well known.
    """
    if Path(file).is_absolute() or file.startswith("<"):
        return file
    for folder in ("", sysconfig.get_path("stdlib"), *sys.path):
        path = Path(folder, file)
        if _is_file(path):
            return str(path.absolute())
    package = re.split(r"[/\\]", file)[0]
    return str(Path(sysconfig.get_path("purelib"), file)) if package in _PACKAGES else file


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name that a file can have
        return False
