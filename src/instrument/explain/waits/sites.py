"""Finds the user's line: decides whose code a file is, and walks frames outward past torch and libraries.

A walk costs 1-3 us; `traceback.extract_stack` would cost 18.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from ...base.compat.compiler import own_name
from ...base.findings import Site
from ...base.patch import TRANSPARENT
from ...base.source_paths import INSTALLED

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
_PATHS = sysconfig.get_paths()
_STANDARD = tuple({_PATHS["stdlib"] + os.sep, _PATHS["platstdlib"] + os.sep})
# Files of torch that calls only pass through: none of their lines synchronizes
_PASS_THROUGH_FILES = (
    "/_tensor.py", "/_tensor_str.py", "/functional.py", "/overrides.py", "/_ops.py", "/_compile.py", "/storage.py",
    "/utils/_contextlib.py", "/utils/_python_dispatch.py", "/utils/_device.py", "/_dynamo/", "/autograd/",
    "/_subclasses/", "/nn/modules/module.py", "/cuda/__init__.py", "/cuda/streams.py", "/accelerator/",
    "/_linalg_utils.py", "/_jit_internal.py", "/nn/functional.py", "/utils/_pytree.py", "/_prims_common/",
)  # fmt: skip

_PASS_THROUGH_FUNCTIONS = ("__torch_function__", "__torch_dispatch__")  # even if the user defines them

USER, LIBRARY, SKIPPED = range(3)


class Location(NamedTuple):
    """The user's line and the library's line of a call, with the frame of the inner one."""

    site: Site | None
    via: Site | None
    frame: FrameType | None


@lru_cache(maxsize=4096)
def code_owner(filename: str) -> int:
    """Return whose code is in a file: USER, LIBRARY, or SKIPPED for lines that are never shown."""
    if filename.startswith((_PACKAGE, TRANSPARENT, "<frozen", "<eval_with_key>", contextlib.__file__)):
        return SKIPPED
    rest = _path_in_torch(filename)
    if rest is not None:
        return SKIPPED if rest.replace(os.sep, "/").startswith(_PASS_THROUGH_FILES) else LIBRARY
    if any(part in filename for part in INSTALLED):
        return LIBRARY
    return LIBRARY if filename.startswith(_STANDARD) else USER


def owner_of(code: CodeType) -> int:
    """Return whose code this is: USER, LIBRARY or SKIPPED, as `code_owner` says of its file."""
    return SKIPPED if code.co_name in _PASS_THROUGH_FUNCTIONS else code_owner(code.co_filename)


def in_torch(filename: str) -> bool:
    """Return whether a file is part of torch."""
    return _path_in_torch(filename) is not None


@lru_cache(maxsize=4096)
def _path_in_torch(filename: str) -> str | None:
    """Return the path of a file inside torch, which need not be imported; None for other files."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    home = None if torch is None else str(Path(torch).parent)
    if home is not None and filename.startswith(home + os.sep):
        return filename[len(home) :]
    for packages in INSTALLED:
        rest = filename.rpartition(packages)[2]
        if rest != filename and rest.startswith(f"torch{os.sep}"):
            return rest.removeprefix("torch")
    return None


@lru_cache(maxsize=4096)
def _site(filename: str, line: int, function: str) -> Site:  # equal code of two files is one key
    return Site(filename, line, function)


def locate(frame: FrameType | None) -> Location:
    """Return the location of ``frame``, or of the first frame around it that is not skipped.

    Without a user's frame, as on threads of libraries, `site` is None and `via` the innermost line.
    """
    via: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        owned_by = owner_of(code)
        if owned_by == USER:
            inner = via or frame
            return Location(_site_of(frame), _site_of(via), inner)
        if owned_by == LIBRARY and via is None:
            via = frame
        frame = frame.f_back
    return Location(None, _site_of(via), via)


def _site_of(frame: FrameType | None) -> Site | None:
    return None if frame is None else site_in(frame.f_code, frame.f_lineno or 0)


def site_in(code: CodeType, line: int) -> Site:
    """Return a line of ``code``."""
    filename = code.co_filename
    if not filename.startswith(os.sep) and Path(filename).exists():  # relative to the present current folder
        filename = str(Path(filename).absolute())
    return _site(filename, line, own_name(getattr(code, "co_qualname", code.co_name)))
