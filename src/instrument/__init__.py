"""Name the parts of a PyTorch step once; see them in every profiler.

Public names are loaded on first use, so that ``import instrument`` imports neither torch nor a profiler.
"""

TYPE_CHECKING = False  # type checkers take it for True; typing itself is not worth its import here
if TYPE_CHECKING:
    from .base.config import configure
    from .base.errors import CaptureError, InstrumentError, LaunchError, SyncError, TraceError
    from .base.findings import Evidence, Finding
    from .explain.comparison.comparison import Comparison, compare
    from .explain.diagnosis.diagnose import Diagnosis, diagnose, rule
    from .explain.metrics.metrics import Metrics, metrics
    from .explain.rules.trace_facts import MissingEvidenceError
    from .explain.slimming.slim import SlimTrace, slim
    from .explain.waits.audit import audit_syncs
    from .explain.waits.report import SyncReport
    from .integrations.opentelemetry import OpenTelemetry
    from .read.jobs.align import align
    from .read.jobs.merge import MergedTrace, merge_traces
    from .read.jobs.ranks import TraceSet
    from .read.jobs.read import read_trace, read_traces
    from .read.measures.launches import projection
    from .read.memory.read import read_memory
    from .read.memory.snapshot import MemorySnapshot
    from .read.tables.trace import Trace, to_arrow
    from .record.allocator_history.options import MemoryHistory, memory_history
    from .record.handover.storage import Keep, keep
    from .record.modules.installer import annotate_modules
    from .record.modules.parts import annotate_step
    from .record.modules.service import Handle
    from .record.planning.ranks import choose_ranks
    from .record.planning.schedule import Schedule, Window, schedule
    from .record.regions.annotation import annotate, mark
    from .record.slow_steps.box import BlackBox, black_box
    from .record.slow_steps.judging import SlowStep
    from .record.slow_steps.rank_judging import SlowRank
    from .record.slow_steps.slow_ranks import slow_ranks
    from .record.slow_steps.step_numbers import StepNumbers, every
    from .record.windows.api import profile
    from .record.windows.profile import Profile
    from .record.windows.steps import steps
    from .show.terminal.summarize import TraceSummary, summarize
    from .syncs.dryrun.run import dry_run
    from .syncs.live import detect_syncs, no_syncs
    from .syncs.policy import allow_sync

__version__ = "0.1.0"
__all__ = [
    "BlackBox",
    "CaptureError",
    "Comparison",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Handle",
    "InstrumentError",
    "Keep",
    "LaunchError",
    "MemoryHistory",
    "MemorySnapshot",
    "MergedTrace",
    "Metrics",
    "MissingEvidenceError",
    "OpenTelemetry",
    "Profile",
    "Schedule",
    "SlimTrace",
    "SlowRank",
    "SlowStep",
    "StepNumbers",
    "SyncError",
    "SyncReport",
    "Trace",
    "TraceError",
    "TraceSet",
    "TraceSummary",
    "Window",
    "align",
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
    "every",
    "keep",
    "mark",
    "memory_history",
    "merge_traces",
    "metrics",
    "no_syncs",
    "profile",
    "projection",
    "read_memory",
    "read_trace",
    "read_traces",
    "rule",
    "schedule",
    "slim",
    "slow_ranks",
    "steps",
    "summarize",
    "to_arrow",
]

_HOMES = {
    "BlackBox": ".record.slow_steps.box",
    "CaptureError": ".base.errors",
    "Comparison": ".explain.comparison.comparison",
    "Diagnosis": ".explain.diagnosis.diagnose",
    "Evidence": ".base.findings",
    "Finding": ".base.findings",
    "Handle": ".record.modules.service",
    "InstrumentError": ".base.errors",
    "Keep": ".record.handover.storage",
    "LaunchError": ".base.errors",
    "MemoryHistory": ".record.allocator_history.options",
    "MemorySnapshot": ".read.memory.snapshot",
    "MergedTrace": ".read.jobs.merge",
    "Metrics": ".explain.metrics.metrics",
    "MissingEvidenceError": ".explain.rules.trace_facts",
    "OpenTelemetry": ".integrations.opentelemetry",
    "Profile": ".record.windows.profile",
    "Schedule": ".record.planning.schedule",
    "SlimTrace": ".explain.slimming.slim",
    "SlowRank": ".record.slow_steps.rank_judging",
    "SlowStep": ".record.slow_steps.judging",
    "StepNumbers": ".record.slow_steps.step_numbers",
    "SyncError": ".base.errors",
    "SyncReport": ".explain.waits.report",
    "Trace": ".read.tables.trace",
    "TraceError": ".base.errors",
    "TraceSet": ".read.jobs.ranks",
    "TraceSummary": ".show.terminal.summarize",
    "Window": ".record.planning.schedule",
    "align": ".read.jobs.align",
    "allow_sync": ".syncs.policy",
    "annotate": ".record.regions.annotation",
    "annotate_modules": ".record.modules.installer",
    "annotate_step": ".record.modules.parts",
    "audit_syncs": ".explain.waits.audit",
    "black_box": ".record.slow_steps.box",
    "choose_ranks": ".record.planning.ranks",
    "configure": ".base.config",
    "detect_syncs": ".syncs.live",
    "compare": ".explain.comparison.comparison",
    "diagnose": ".explain.diagnosis.diagnose",
    "dry_run": ".syncs.dryrun.run",
    "every": ".record.slow_steps.step_numbers",
    "keep": ".record.handover.storage",
    "mark": ".record.regions.annotation",
    "memory_history": ".record.allocator_history.options",
    "merge_traces": ".read.jobs.merge",
    "metrics": ".explain.metrics.metrics",
    "no_syncs": ".syncs.live",
    "profile": ".record.windows.api",
    "projection": ".read.measures.launches",
    "read_memory": ".read.memory.read",
    "read_trace": ".read.jobs.read",
    "read_traces": ".read.jobs.read",
    "rule": ".explain.diagnosis.diagnose",
    "schedule": ".record.planning.schedule",
    "slim": ".explain.slimming.slim",
    "slow_ranks": ".record.slow_steps.slow_ranks",
    "steps": ".record.windows.steps",
    "summarize": ".show.terminal.summarize",
    "to_arrow": ".read.tables.trace",
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
