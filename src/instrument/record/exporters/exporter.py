"""`Exporter` and `Capture`, the interface of exporters; `choose` takes the one that a user names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ...base import log
from ...base.compat import tools

if TYPE_CHECKING:
    from .torch_profiler import Detail


class Capture(Protocol):
    """The recording of one window. All methods are called on one thread.

    A capture is made at the first step of the window's warm-up or, without warm-up, at the first recorded step. A
    capture that is always complete needs neither ``ended`` nor ``incomplete``.

    Attributes:
        raw: the trace of torch.profiler that `save` wrote, which another process compresses and reads, or None.
        ended: whether the recording ended before `stop`; `step`, `add_metadata` and `stop` then do nothing.
        incomplete: why the recording is incomplete, in words; known after `save`.
    """

    raw: Path | None

    def start(self) -> None:
        """Start recording."""

    def step(self, number: int | None) -> None:
        """Begin the recorded step ``number``; with None, end the last one."""

    def add_metadata(self, key: str, value: str) -> None:
        """Put a text into the recording, if its format allows that; called after `start`."""

    def stop(self) -> None:
        """Stop recording."""

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Write the files into ``folder`` and return them; none if the tool itself writes them later."""

    def discard(self) -> None:
        """End a capture that never started."""


class Exporter(Protocol):
    """Makes captures; the manifest has its ``name``."""

    name: str
    hint: str  # where users find the recording, if the exporter writes no files

    def prepare(self) -> None:
        """Do slow set-up work before the loop begins."""

    def capture(self) -> Capture:
        """Make the capture of one window."""


_IS_RUNNING_UNDER: Mapping[str, Callable[[], bool]] = {
    "nsight_systems": tools.nsight_systems,
    "nsight_compute": tools.nsight_compute,
    "rocprof": tools.rocprof,
    "vtune": tools.vtune,
}
EXPORTERS = ("torch_profiler", *_IS_RUNNING_UNDER, "none")
ExporterName = Literal["auto", "torch_profiler", "nsight_systems", "nsight_compute", "rocprof", "vtune", "none"]


def exporter_of_tool() -> str | None:
    """Return the name of the exporter for the vendor's tool that this process runs under; None without one."""
    return next((name for name, is_running in _IS_RUNNING_UNDER.items() if is_running()), None)


def choose(
    exporter: str | Exporter,
    options: Mapping[str, Any],
    detail: Detail = "operators",
    *,
    keeps_events: bool = True,
) -> Exporter:
    """Return the exporter for the argument ``exporter``.

    Args:
        exporter: "auto", a name in `EXPORTERS`, or an exporter. "auto" means the vendor's tool that this process
            runs under, else torch.profiler, which under such a tool would be measured with the program.
        options: arguments for `torch.profiler.profile`.
        detail: what torch.profiler records.
        keeps_events: whether the events of torch.profiler are read in this process.

    Raises:
        ValueError: the name or ``detail`` is unknown.
        TypeError: ``exporter`` is not an exporter, or torch.profiler does not accept ``options``.
        ImportError: a package that the exporter needs is missing.
    """
    from .torch_profiler import DETAILS, TorchProfilerExporter
    from .vendor_tools import VENDOR_EXPORTERS

    def make(name: str) -> Exporter:
        if name == "torch_profiler":
            return TorchProfilerExporter(options, detail, keeps_events=keeps_events)
        return VENDOR_EXPORTERS[name]()

    if detail not in DETAILS:
        raise ValueError(f'"detail" must be one of {", ".join(DETAILS)}: {detail!r}')
    if exporter == "auto":
        exporter = exporter_of_tool() or "torch_profiler"
        try:
            return make(exporter)
        except ImportError as error:  # chosen automatically, so its absence must not stop the program
            log.warning(f"windows are recorded by torch.profiler: {error}", exporter=exporter)
            return make("torch_profiler")
    if not isinstance(exporter, str):
        if not hasattr(exporter, "capture"):
            raise TypeError(f'"exporter" must be a name or an object with a method "capture": {exporter!r}')
        return exporter
    if exporter not in EXPORTERS:
        raise ValueError(f'"exporter" must be "auto", one of {", ".join(EXPORTERS)}, or an exporter: {exporter!r}')
    return make(exporter)
