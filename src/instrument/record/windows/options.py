"""The keyword arguments of `profile` and `steps`, for type checkers and editors.

Only they import this module, as Python 3.10 has no `typing.Unpack`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypedDict

from torch.profiler import ProfilerActivity

from ..allocator_history.options import MemoryHistory
from ..exporters.exporter import Exporter, ExporterName
from ..exporters.torch_options import Detail
from ..handover.storage import Keep
from .profile import Profile


class TorchProfilerOptions(TypedDict, total=False):
    """The arguments of `torch.profiler.profile` that a profile passes on."""

    activities: Iterable[ProfilerActivity] | None
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    with_modules: bool
    experimental_config: Any
    execution_trace_observer: Any
    acc_events: bool
    custom_trace_id_callback: Callable[[], str] | None
    post_processing_timeout_s: float | None


class ProfileArguments(TorchProfilerOptions, total=False):
    """The arguments of `profile` except for the folder and the schedule."""

    on_trace_ready: Callable[[Profile], Any] | None
    on_summary: Callable[[str], None] | None
    diagnose: bool
    detail: Detail
    compile_log: bool
    memory: Literal["snapshot"] | MemoryHistory | None
    exporter: ExporterName | Exporter
    ranks: Iterable[int] | str | None
    first_step: int
    triggers: str | Iterable[str]
    trigger_steps: int
    black_box: bool
    keep: Keep | None
    upload: str | None
    upload_timeout: float
