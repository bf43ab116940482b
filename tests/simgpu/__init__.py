"""The simulated GPU, for tests: whether it is there, its settings, and the log of what it did.

`make gpu-sim` builds it; a process has it where SIMGPU=1 is set in that environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.simgpu.settings import BY_NAME, Value

__all__ = ["Entry", "active", "computes", "configure", "configured", "log", "numerics", "value_of"]


@dataclass(frozen=True)
class Entry:
    """One work of the device, or one call that waited for it. Times are in ns of CLOCK_REALTIME.

    Of a wait, `start` is when it was called, `end` when what it waited for had ended (or `start` if that is
    later), and `returned` when the call returned; of other work `returned` is 0.
    """

    kind: str
    """"kernel", "memcpy" or "memset"; "wait_stream", "wait_device", "wait_event", "wait_copy", "wait_free" or
    "wait_queue"."""
    name: str
    device: int
    stream: int
    correlation: int
    graph: int
    enqueued: int
    start: int
    end: int
    returned: int
    bytes: int
    blocks: int
    """Of a kernel's grid."""
    threads: int
    """Of each block."""

    @property
    def duration(self) -> int:
        return self.end - self.start


def library() -> ctypes.CDLL:
    """Return the functions of this process, the simulation's among them."""
    everything = ctypes.CDLL(None)
    everything.sim_get.restype = ctypes.c_char_p
    return everything


def active() -> bool:
    """Return whether this process has the simulated GPU."""
    return hasattr(ctypes.CDLL(None), "sim_set")


def value_of(name: str) -> str:
    """Return a setting as it is now."""
    text: bytes = library().sim_get(name.upper().encode())
    return text.decode()


def configure(**settings: Value) -> None:
    """Change settings of this process, by their names in lower case; none is changed if one is wrong.

    Raises:
        ValueError: a name or a value that isn't accepted.
    """
    texts = {}
    for name, value in settings.items():
        setting = BY_NAME.get(name.upper())
        if setting is None:
            raise ValueError(f'"{name}" is none of the settings: {", ".join(sorted(BY_NAME)).lower()}')
        if setting.at_start_only:
            raise ValueError(f'"{name}" is read when a process starts: set SIMGPU_{setting.name}={value}')
        texts[setting.name] = setting.text(value)
    for name, text in texts.items():
        if library().sim_set(name.encode(), text.encode()):
            raise RuntimeError(f"the libraries do not know {name}: build them again")


@contextmanager
def configured(**settings: Value) -> Iterator[None]:
    """Change settings for a block."""
    before = {name: value_of(name) for name in settings if name.upper() in BY_NAME}
    configure(**settings)
    try:
        yield
    finally:
        configure(**before)


@contextmanager
def log() -> Iterator[list[Entry]]:
    """Keep the log of what the device does in a block: the list is filled at its end, in the order of ends.

    Work that has not ended by then is missing, so that most blocks end with a synchronization.
    """
    entries: list[Entry] = []
    functions = library()
    first = functions.sim_log_start()
    try:
        yield entries
    finally:
        number, path = tempfile.mkstemp(prefix="simgpu-log-")
        os.close(number)
        functions.sim_log_write(path.encode(), first)
        functions.sim_log_stop()
        lines = Path(path).read_text().splitlines()
        Path(path).unlink()
        entries.extend(Entry(**json.loads(line)) for line in lines)


def computes() -> bool:
    """Return whether the values of kernels are computed."""
    return bool(library().sim_computes())


def numerics() -> AbstractContextManager[None]:
    """Compute the values of kernels in a block; `tests.simgpu.values` says how, and what it does not compute."""
    from tests.simgpu.values import numerics  # imports torch

    return numerics()
