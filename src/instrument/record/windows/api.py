"""`profile` and `new_profile`: check the arguments and make a `Profile`, for users and for adapters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ...base.guard import guard
from ..allocator_history.options import MemoryHistory
from ..exporters.exporter import Exporter, ExporterName, choose
from ..exporters.torch_profiler import Detail
from ..handover.storage import Keep, masked
from ..planning.requests import RequestedWindows
from ..planning.schedule import NEVER, NOTHING, Schedule, TorchSchedule, schedule
from ..planning.triggers import Triggers
from ..slow_steps.step_numbers import OnSteps
from .driver import Driver as Driver
from .driver import ProfileOptions
from .profile import DEPTH as DEPTH
from .profile import STEP_PARTS as STEP_PARTS
from .profile import Profile, models_in
from .window_recorder import FEATURE

if TYPE_CHECKING:
    from torch import nn
    from torch.profiler import ProfilerActivity
    from typing_extensions import Unpack


class TorchProfilerOptions(TypedDict, total=False):
    """The arguments of `torch.profiler.profile` that a profile passes on."""

    activities: Iterable[ProfilerActivity] | None
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    with_modules: bool
    experimental_config: Any
    custom_profiler_config: Mapping[str, Any] | str | None
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
    on_steps: OnSteps
    keep: Keep | None
    upload: str | None
    upload_timeout: float


def uncounted_profile(*_: Any, **__: Any) -> Profile:
    """Return a profile that only counts steps, in place of one that could not be made."""
    return Profile.__new__(Profile)


@guard.prepared(FEATURE, otherwise=uncounted_profile)
def profile(
    out: str | os.PathLike[str] = "runs/instrument",
    *,
    schedule: Schedule | str | Callable[[int], Any] | None = None,
    modules: nn.Module | Iterable[nn.Module] | None = None,
    on_trace_ready: Callable[[Profile], Any] | None = None,
    on_summary: Callable[[str], None] | None = None,
    diagnose: bool = False,
    detail: Detail = "operators",
    compile_log: bool = False,
    memory: Literal["snapshot"] | MemoryHistory | None = None,
    exporter: ExporterName | Exporter = "auto",
    ranks: Iterable[int] | str | None = None,
    first_step: int = 0,
    triggers: str | Iterable[str] = (),
    trigger_steps: int = 3,
    black_box: bool = False,
    on_steps: OnSteps = None,
    keep: Keep | None = None,
    upload: str | None = None,
    upload_timeout: float = 60.0,
    **options: Unpack[TorchProfilerOptions],
) -> Profile:
    """Record chosen steps of a training loop; call ``.step()`` on what this returns after each step.

    Each window lands in ``OUT/window-0001/`` as ``rank0.TIME.pt.trace.json.gz``, which opens in Perfetto,
    chrome://tracing and TensorBoard; ``OUT/manifest.jsonl`` has the outcome of each. After the last window a
    summary is printed to stderr. No failure of the recording reaches the loop.

    Args:
        out: the folder.
        schedule: the result of `instrument.schedule`, named steps ("10-12"), or a function of a step's number
            such as `torch.profiler.schedule` returns; None records everything in one window.
        modules: a model, or several, whose modules are regions in the windows, down to 4 levels and under their
            class, as are the optimizer, the backward pass and the data loader; for other levels and names call
            `annotate_modules` instead.
        on_trace_ready: called at the end of each window, on the loop's thread, with the profile.
        on_summary: called with the text of the summary, on another thread; None prints it to standard error.
        diagnose: write what is slow in each window, and why, as JSON and as a page beside its trace, and end the
            summary with that of the last window, as `instrument.diagnose` says.
        detail: what torch.profiler records: "regions" (named ranges, steps and the GPU's work, without the CPU's
            operators), "operators", or "full" (also shapes, memory, stacks and FLOPs). The single options
            take precedence.
        compile_log: write torch's structured log (``TORCH_TRACE``) of what is compiled in a window beside its
            trace, as ``rank0.TIME.compile.log``; `diagnose` reads it.
        memory: "snapshot", or the result of `instrument.memory_history`: write torch's history of the GPU's memory
            in a window, with its regions, beside its trace, as ``rank0.TIME.memory.pickle``, also when an
            allocation fails in the window; `instrument.read_memory` reads it. The first window has one, later
            ones as often as the cost allows. It blocks the loop for seconds at the end of the window.
        exporter: "auto", "torch_profiler", "nsight_systems", "nsight_compute", "rocprof", "vtune", "none" (for
            ``memory`` alone), or an object with the methods of an exporter. "auto" means the vendor's tool that
            the process runs under, else torch.profiler.
        ranks: the ranks that record, also as text ("0,7", "node=0", "local=0", "sample=4") or from
            `choose_ranks`; None for all. The other ranks only count steps, and never wait.
        first_step: the number of the first step, for a resumed run. Named steps and periods of a schedule
            still count from 0, cycles (wait, warmup, active) from this step.
        triggers: what opens further windows while the loop runs: "command" (``instrument trigger``), "file" (the
            file ``OUT/trigger`` is touched), "file=PATH", "signal=SIGUSR2", "every=30m", "at=02:30"; several, or
            one text with commas. Without a schedule, only these open windows. `Profile.trigger` needs none.
        trigger_steps: the number of steps that such a window records, after one warm-up step.
        black_box: whether a slow step opens a window, as `instrument.black_box` finds them; the times of the steps
            before the window are written beside its trace. ``prof.black_box`` is the box.
        on_steps: a function that is called every 100 steps, on the loop's thread, with their `StepNumbers`; the
            result of `instrument.every`; or several of these. On ranks that record nothing it is called, too.
            Without a schedule, it opens no window.
        keep: how long the files of windows stay, as `instrument.keep` returns it; None for always.
        upload: the URL of a remote folder, as fsspec takes it ("s3://bucket/runs/x"), that windows are copied to
            by another process; None for none.
        upload_timeout: how long the end of the run waits for uploads, in s.
        options: those of `torch.profiler.profile`: ``activities``, ``record_shapes``,
            ``profile_memory``, ``with_stack``, ``with_flops``, ``experimental_config``, ... and
            ``custom_profiler_config``, which selects torch's second backend: {"backend": "cupti_monitor"}. Without
            ``activities``, the CPU is recorded and, if the program uses it when a window begins, the GPU.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message gives its name and value.

    Example:
        >>> with profile("runs/bert", schedule=schedule(wait=1, warmup=1, active=3, repeat=2)) as prof:
        ...     for batch in loader:
        ...         train_step(batch)
        ...         prof.step()
    """
    arguments = dict(locals())  # each by its name
    models = models_in(arguments.pop("modules"))
    made = new_profile(Driver(), **arguments.pop("options"), **arguments)
    made.annotate(models)
    return made


def new_profile(
    driver: Driver,
    out: str | os.PathLike[str] = "runs/instrument",
    *,
    schedule: Schedule | str | Callable[[int], Any] | None = None,
    **arguments: Any,
) -> Profile:
    """Check the arguments of `profile` and make one for ``driver``.

    Raises:
        TypeError, ValueError: as `profile`.
    """
    return _new_profile(driver, folder_of(out), schedule, ProfileOptions.of(arguments))


# Options that a phase of the program does not take over
_OF_TRAINING: dict[str, Any] = {
    "on_trace_ready": None, "first_step": 0, "triggers": (), "black_box": False, "on_steps": None,
    "compile_log": False,
}  # fmt: skip


def _new_profile(
    driver: Driver,
    folder: Path,
    schedule: Schedule | str | Callable[[int], Any] | None,
    options: ProfileOptions,
) -> Profile:
    reads_events = driver.keeps_events or options.on_trace_ready is not None
    exporter = choose(options.exporter, options.torch, options.detail, keeps_events=reads_events)
    triggers = Triggers(options.triggers, folder, options.trigger_steps)
    if schedule is None and (triggers or options.black_box or options.on_steps is not None):
        schedule = NOTHING
    planned = _resolved(schedule, options.first_step)
    windows = RequestedWindows(planned, driver.phase, has_schedule=schedule is not None)
    made = Profile(folder, windows, exporter, triggers, options, driver)

    def new_phase(name: str, schedule: Schedule | str | None) -> Profile:
        return _new_profile(
            Driver(f'prof.phase("{name}", "{{}}")', keeps_events=False, phase=name, phase_of=made.run),
            folder,
            NOTHING if schedule is None else schedule,
            replace(options, **_OF_TRAINING),
        )

    made.new_phase = new_phase
    return made


def folder_of(out: Any) -> Path:
    """Return the folder ``out`` as an absolute path, as the program may change the current folder.

    Raises:
        TypeError, ValueError: ``out`` is not a path, or a URL.
    """
    if not isinstance(out, (str, os.PathLike)):
        hint = '; the schedule goes into "schedule": profile("runs/x", schedule=...)' if callable(out) else ""
        raise TypeError(f'"out" must be the path of a folder: {out!r}{hint}')
    if "://" in str(out):
        shown = masked(str(out))
        raise ValueError(f'"out" must be a local folder: {shown!r}; "upload" copies it: upload={shown!r}')
    return Path(out).absolute()


def _resolved(given: Schedule | str | Callable[[int], Any] | None, first_step: int) -> Schedule | TorchSchedule:
    if given is None:
        return schedule(at=first_step, active=NEVER)
    if isinstance(given, str):
        given = schedule(given)
    if isinstance(given, Schedule):
        return given.starting(first_step)
    if callable(given):
        return TorchSchedule(given, first_step)
    raise TypeError(f'"schedule" must be an instrument.schedule(...) or a function of a step\'s number: {given!r}')
