"""Which exporter a process should use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from .. import log, tools
from .capture import Exporter

_UNDER: Mapping[str, Callable[[], bool]] = {
    "nsight_systems": tools.nsight_systems,
    "nsight_compute": tools.nsight_compute,
    "rocprof": tools.rocprof,
    "vtune": tools.vtune,
}
EXPORTERS = ("torch_profiler", *_UNDER)
ExporterName = Literal["auto", "torch_profiler", "nsight_systems", "nsight_compute", "rocprof", "vtune"]


def under() -> str | None:
    """Return the exporter of the vendor's tool that this process runs under; None where there is none."""
    return next((name for name, found in _UNDER.items() if found()), None)


def choose(exporter: str | Exporter, options: Mapping[str, Any]) -> Exporter:
    """Return the exporter called for.

    Args:
        exporter: "auto" (that of the vendor's tool which this process runs under, else torch.profiler, which
            would be measured by that tool together with the program), a name out of `EXPORTERS`, or an exporter.
        options: arguments for `torch.profiler.profile`.

    Raises:
        ValueError: an unknown name.
        TypeError: not an exporter; or ``options`` that torch.profiler does not take.
        ImportError: what the exporter needs is missing.
    """
    if exporter == "auto":
        exporter = under() or "torch_profiler"
        try:
            return _made(exporter, options)
        except ImportError as error:  # nobody asked for it by name, so the program is not to stop for it
            log.warning(f"windows are recorded by torch.profiler: {error}", exporter=exporter)
            return _made("torch_profiler", options)
    if not isinstance(exporter, str):
        if not hasattr(exporter, "capture"):
            raise TypeError(f'"exporter" must be a name or an object with a method "capture": {exporter!r}')
        return exporter
    if exporter not in EXPORTERS:
        raise ValueError(f'"exporter" must be "auto", one of {", ".join(EXPORTERS)}, or an exporter: {exporter!r}')
    return _made(exporter, options)


def _made(name: str, options: Mapping[str, Any]) -> Exporter:
    """Make the exporter, importing no more than what it needs."""
    if name == "nsight_systems":
        from .nsight_systems import NsightSystemsExporter

        return NsightSystemsExporter()
    if name == "nsight_compute":
        from .vendor_tools import NsightComputeExporter

        return NsightComputeExporter()
    if name == "rocprof":
        from .vendor_tools import RocprofExporter

        return RocprofExporter()
    if name == "vtune":
        from .vendor_tools import VtuneExporter

        return VtuneExporter()
    from .torch_profiler import TorchProfilerExporter

    return TorchProfilerExporter(options)
