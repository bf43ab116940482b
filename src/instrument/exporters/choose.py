"""Which exporter a process should use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import tools
from .capture import Exporter

EXPORTERS = ("torch_profiler", "nsight_systems")


def choose(exporter: str | Exporter, options: Mapping[str, Any]) -> Exporter:
    """Return the exporter called for.

    Args:
        exporter: "auto" (Nsight Systems in a process under nsys, else torch.profiler), a name out of
            `EXPORTERS`, or an exporter.
        options: arguments for `torch.profiler.profile`.

    Raises:
        ValueError: an unknown name.
        TypeError: not an exporter; or ``options`` that torch.profiler does not take.
    """
    if exporter == "auto":
        exporter = "nsight_systems" if tools.nsight_systems() else "torch_profiler"
    if exporter == "nsight_systems":
        from .nsight_systems import NsightSystemsExporter

        return NsightSystemsExporter()
    if exporter == "torch_profiler":
        from .torch_profiler import TorchProfilerExporter

        return TorchProfilerExporter(options)
    if isinstance(exporter, str):
        raise ValueError(f'"exporter" must be "auto", one of {", ".join(EXPORTERS)}, or an exporter: {exporter!r}')
    if not hasattr(exporter, "capture"):
        raise TypeError(f'"exporter" must be a name or an object with a method "capture": {exporter!r}')
    return exporter
