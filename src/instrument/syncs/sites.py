"""Where in the user's code: walks frames outward, past torch and the libraries in between.

A walk costs 1-3 us; `traceback.extract_stack` would cost 18.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ..patch import TRANSPARENT
from .finding import Site
from .roots import INSTALLED

_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_PATHS = sysconfig.get_paths()
_STANDARD = tuple({_PATHS["stdlib"] + os.sep, _PATHS["platstdlib"] + os.sep})
# Files of torch through which everything goes: they are no line that did something
_PLUMBING = (
    "/_tensor.py", "/_tensor_str.py", "/functional.py", "/overrides.py", "/_ops.py", "/_compile.py", "/storage.py",
    "/utils/_contextlib.py", "/utils/_python_dispatch.py", "/utils/_device.py", "/_dynamo/", "/autograd/",
    "/_subclasses/", "/nn/modules/module.py", "/cuda/__init__.py", "/cuda/streams.py", "/accelerator/",
    "/_linalg_utils.py", "/_jit_internal.py", "/nn/functional.py", "/utils/_pytree.py", "/_prims_common/",
)  # fmt: skip

_PASSED_THROUGH = ("__torch_function__", "__torch_dispatch__")  # also where they are the user's

USER, LIBRARY, SKIPPED = range(3)


class Place(NamedTuple):
    """The user's line and the library's, with the frame of the innermost of the two."""

    site: Site | None
    via: Site | None
    frame: FrameType | None


@lru_cache(maxsize=4096)
def kind(filename: str) -> int:
    """Tell whose code a file is: USER, LIBRARY, or SKIPPED where it is no line to show."""
    if filename.startswith((_OURS, TRANSPARENT, "<frozen", "<eval_with_key>", contextlib.__file__)):
        return SKIPPED
    rest = _in_torch(filename)
    if rest is not None:
        return SKIPPED if rest.replace(os.sep, "/").startswith(_PLUMBING) else LIBRARY
    if any(part in filename for part in INSTALLED):
        return LIBRARY
    return LIBRARY if filename.startswith(_STANDARD) else USER


def _in_torch(filename: str) -> str | None:
    """Return the rest of the path of a file of torch, which need not be imported; None for other files."""
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
def _site(filename: str, line: int, function: str) -> Site:  # equal code of two files is one key: not by code
    return Site(filename, line, function)


def locate(frame: FrameType | None) -> Place:
    """Return where ``frame``, or the first one around it that counts, is in the user's code.

    Where no frame is the user's, as on threads of libraries, `site` is None and `via` the innermost line.
    """
    via: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        whose = SKIPPED if code.co_name in _PASSED_THROUGH else kind(code.co_filename)
        if whose == USER:
            inner = via or frame
            return Place(_at(frame), _at(via), inner)
        if whose == LIBRARY and via is None:
            via = frame
        frame = frame.f_back
    return Place(None, _at(via), via)


def _at(frame: FrameType | None) -> Site | None:
    if frame is None:
        return None
    code = frame.f_code
    filename = code.co_filename
    if not filename.startswith(os.sep) and Path(filename).exists():  # of the folder that is the current one now
        filename = str(Path(filename).absolute())
    return _site(filename, frame.f_lineno or 0, getattr(code, "co_qualname", code.co_name))
