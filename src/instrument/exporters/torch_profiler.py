"""Record a window with torch.profiler and leave a gzipped Chrome trace.

A profiler object serves one window only: a scheduled one that is started again loses all but one trace.
"""

from __future__ import annotations

import difflib
import gzip
import inspect
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from .. import log, tools
from ..compat import profiler_running, range_functions
from ..errors import CaptureError
from ..regions.region import plain
from .raw_trace import packed
from .sessions import sessions

_OURS = ("schedule", "on_trace_ready")
# What people may have meant by an option that torch does not know.
_PLAN = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait", "at", "every")
_PROFILE = ("out", "schedule", "on_trace_ready", "exporter", "ranks", "first_step")
SUFFIX = ".pt.trace.json"  # what TensorBoard's profiler plugin looks for


class TorchProfilerExporter:
    """Makes a fresh `torch.profiler.profile` for each window.

    Args:
        options: arguments for `torch.profiler.profile`, but for ``schedule`` and ``on_trace_ready``.

    Raises:
        TypeError: an option that torch.profiler does not know.
        ValueError: a value that it refuses.
    """

    name = "torch_profiler"
    hint = ""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from torch.profiler import ProfilerActivity, profile

        accepted = [name for name in inspect.signature(profile).parameters if name not in _OURS]
        for name, value in options.items():
            if name not in accepted:
                raise TypeError(f'"{name}" is no option: {value!r}; {_hint(name, accepted)}')
        self._options = dict(options)
        tool = tools.gpu_tracer()
        if tool is not None:
            # The GPU's tracing interface has one user at a time; a second one breaks both recordings.
            self._options["activities"] = [ProfilerActivity.CPU]
            log.warning(f"{tool} traces the GPU: torch.profiler records the CPU only")
        try:
            profile(**self._options)
        except Exception as error:  # torch raises whatever it stumbles over, without naming the argument
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise ValueError(f"torch.profiler refuses {given}: {error}") from error

    def prepare(self) -> None:
        """Import torch._inductor, which torch's profiler does when first used and which takes a second."""
        import torch

        sessions.watch()
        hasattr(torch, "_inductor")

    def capture(self) -> TorchProfilerCapture:
        """Make a profiler and warm it up."""
        sessions.watch()
        return TorchProfilerCapture(self._options)


class TorchProfilerCapture:
    """One `torch.profiler.profile`, started and stopped once; `profiler` is that object."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from torch.profiler import profile

        if sessions.owner is not None or profiler_running():
            raise CaptureError("another torch profiler is active")
        self._enter, self._exit = range_functions()
        self._step: Any = None
        self.raw: Path | None = None  # the trace as torch wrote it
        self.profiler = profile(**options)
        try:
            self.profiler.prepare_trace()
        except BaseException:
            sessions.left()  # no more: to start and stop what is half prepared crashes torch
            raise
        self._session = sessions.owner

    def start(self) -> None:
        """Record from here on."""
        if sessions.owner is not self._session or profiler_running():
            raise CaptureError("another torch profiler began during warm-up")
        self.profiler.start_trace()

    def step(self, number: int | None) -> None:
        """End the step that is recorded, and begin ``number`` under the name that trace viewers know."""
        if self._step is not None:
            self._exit(self._step)
            self._step = None
        if number is not None:
            self._step = self._enter(f"ProfilerStep#{number}")

    def add_metadata(self, key: str, value: str) -> None:
        """Put a text into the trace."""
        self.profiler.add_metadata_json(plain(key), f'"{plain(value)}"')

    def stop(self) -> None:
        """Record no more; takes 1.4 s for 500,000 events."""
        if sessions.owner is not self._session:
            raise CaptureError("another torch profiler began inside the window, which ended its recording")
        self.profiler.stop_trace()

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Write the trace, 4-7 ms a MB."""
        folder.mkdir(parents=True, exist_ok=True)
        raw = folder / f"{stem}{SUFFIX}"
        self.profiler.export_chrome_trace(str(raw))
        if not _whole(raw):  # torch does not raise
            reason = _write_error(raw)
            for path in (raw, raw.with_name(f"{raw.name}.tmp")):
                path.unlink(missing_ok=True)
            raise OSError(f"torch could not write the trace to {folder}: {reason}")
        self.raw = raw
        return [raw]

    def export(self, path: str) -> None:
        """Copy the trace to ``path``, gzipped if it ends in ".gz": torch itself writes a trace only once."""
        if self.raw is None:
            raise CaptureError("the trace of this window could not be saved")
        with _read(self.raw) as source, _write(path) as target:
            shutil.copyfileobj(source, target, 1 << 20)

    def discard(self) -> None:
        """End a capture that never started: started and stopped at once, or the next one finds it prepared."""
        if sessions.owner is not self._session:
            return
        try:
            if not profiler_running():  # else `start` was interrupted
                self.profiler.start_trace()
            self.profiler.stop_trace()
        finally:
            sessions.left()


def _hint(name: str, accepted: list[str]) -> str:
    if name in _PLAN:
        return f'a plan goes into "schedule": schedule=instrument.schedule({name}=...)'
    close = difflib.get_close_matches(name, [*accepted, *_PLAN, *_PROFILE], 1)
    return f'did you mean "{close[0]}"?' if close else f"torch.profiler takes {', '.join(accepted)}"


def _whole(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")


def _write_error(path: Path) -> str:
    """Return why a file cannot be written, as the system says when more is written beside what torch left."""
    try:
        with path.open("ab", buffering=0) as file:
            for _ in range(16):
                file.write(bytes(1 << 20))
    except OSError as error:
        return str(error)
    return "the reason is not known"


def _read(raw: Path) -> IO[bytes]:
    with suppress(FileNotFoundError):  # compressed in the meantime
        return raw.open("rb")
    return cast(IO[bytes], gzip.open(packed(raw)))


def _write(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "wb", compresslevel=1))
    return Path(path).open("wb")
