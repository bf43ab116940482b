"""Name the parts of a PyTorch step once; see them in every profiler.

Public names are loaded on first use, so that ``import instrument`` imports neither torch nor a profiler.
"""

TYPE_CHECKING = False  # type checkers take it for True; typing itself is not worth its import here
if TYPE_CHECKING:
    from .allocator_history.options import MemoryHistory, memory_history
    from .comparison.comparison import Comparison, compare
    from .config import configure
    from .diagnosis.diagnose import Diagnosis, diagnose, rule
    from .diagnosis.metrics import Metrics, metrics
    from .dryrun.run import dry_run
    from .errors import CaptureError, InstrumentError, LaunchError, SyncError, TraceError
    from .findings import Finding
    from .memory.read import read_memory
    from .memory.snapshot import MemorySnapshot
    from .modules.annotate import annotate_modules
    from .modules.service import Handle
    from .modules.step import annotate_step
    from .regions.annotation import annotate, mark
    from .report.summarize import TraceSummary, summarize
    from .slimming.slim import SlimTrace, slim
    from .slow_steps.api import black_box
    from .slow_steps.box import BlackBox
    from .slow_steps.slow_step import SlowStep
    from .syncs.audit import audit_syncs
    from .syncs.live import detect_syncs, no_syncs
    from .syncs.policy import allow_sync
    from .syncs.report import SyncReport
    from .traces.merge import MergedTrace, merge_traces
    from .traces.ranks import TraceSet
    from .traces.read import read_trace, read_traces
    from .traces.trace import Trace
    from .windows.api import profile
    from .windows.profile import Profile
    from .windows.rank_selection import choose_ranks
    from .windows.schedule import Schedule, Window, schedule
    from .windows.steps import steps
    from .windows.storage import Keep, keep

__version__ = "0.1.0"
__all__ = [
    "BlackBox",
    "CaptureError",
    "Comparison",
    "Diagnosis",
    "Finding",
    "Handle",
    "InstrumentError",
    "Keep",
    "LaunchError",
    "MemoryHistory",
    "MemorySnapshot",
    "MergedTrace",
    "Metrics",
    "Profile",
    "Schedule",
    "SlimTrace",
    "SlowStep",
    "SyncError",
    "SyncReport",
    "Trace",
    "TraceError",
    "TraceSet",
    "TraceSummary",
    "Window",
    "allow_sync",
    "annotate",
    "annotate_modules",
    "annotate_step",
    "audit_syncs",
    "black_box",
    "choose_ranks",
    "compare",
    "configure",
    "detect_syncs",
    "diagnose",
    "dry_run",
    "keep",
    "mark",
    "memory_history",
    "merge_traces",
    "metrics",
    "no_syncs",
    "profile",
    "read_memory",
    "read_trace",
    "read_traces",
    "rule",
    "schedule",
    "slim",
    "steps",
    "summarize",
]

_HOMES = {
    "BlackBox": ".slow_steps.box",
    "CaptureError": ".errors",
    "Comparison": ".comparison.comparison",
    "Diagnosis": ".diagnosis.diagnose",
    "Finding": ".findings",
    "Handle": ".modules.service",
    "InstrumentError": ".errors",
    "Keep": ".windows.storage",
    "LaunchError": ".errors",
    "MemoryHistory": ".allocator_history.options",
    "MemorySnapshot": ".memory.snapshot",
    "MergedTrace": ".traces.merge",
    "Metrics": ".diagnosis.metrics",
    "Profile": ".windows.profile",
    "Schedule": ".windows.schedule",
    "SlimTrace": ".slimming.slim",
    "SlowStep": ".slow_steps.slow_step",
    "SyncError": ".errors",
    "SyncReport": ".syncs.report",
    "Trace": ".traces.trace",
    "TraceError": ".errors",
    "TraceSet": ".traces.ranks",
    "TraceSummary": ".report.summarize",
    "Window": ".windows.schedule",
    "allow_sync": ".syncs.policy",
    "annotate": ".regions.annotation",
    "annotate_modules": ".modules.annotate",
    "annotate_step": ".modules.step",
    "audit_syncs": ".syncs.audit",
    "black_box": ".slow_steps.api",
    "choose_ranks": ".windows.rank_selection",
    "configure": ".config",
    "detect_syncs": ".syncs.live",
    "compare": ".comparison.comparison",
    "diagnose": ".diagnosis.diagnose",
    "dry_run": ".dryrun.run",
    "keep": ".windows.storage",
    "mark": ".regions.annotation",
    "memory_history": ".allocator_history.options",
    "merge_traces": ".traces.merge",
    "metrics": ".diagnosis.metrics",
    "no_syncs": ".syncs.live",
    "profile": ".windows.api",
    "read_memory": ".memory.read",
    "read_trace": ".traces.read",
    "read_traces": ".traces.read",
    "rule": ".diagnosis.diagnose",
    "schedule": ".windows.schedule",
    "slim": ".slimming.slim",
    "steps": ".windows.steps",
    "summarize": ".report.summarize",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
