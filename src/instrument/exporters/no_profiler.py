"""`NoProfiler`: the exporter of windows that no profiler records, such as those of GPU memory alone."""

from __future__ import annotations

from .vendor_tools import VendorCapture


class NoProfiler:
    """Makes captures that record nothing."""

    name = "none"
    hint = ""

    def prepare(self) -> None:
        """Do nothing."""

    def capture(self) -> EmptyCapture:
        """Make the capture of one window."""
        return EmptyCapture()


class EmptyCapture(VendorCapture):
    """The capture of one window, without files."""

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""
