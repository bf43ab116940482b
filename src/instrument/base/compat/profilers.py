"""torch's profilers: their ranges, their starts and stops, the options of a recording."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..patch import Patch
from . import gpu

# torch's profilers that turn its ranges into ranges of another tool
_TARGETS = {"emit_nvtx": "NVTX", "emit_itt": "ITT"}


def range_functions() -> tuple[Callable[..., Any], Callable[[Any], None]]:
    """Return functions that open and close a torch.profiler range of category ``user_annotation``.

    The first takes the name, and the values that the profiler shows as inputs if it records shapes.

    The autograd pair costs a third of `torch.profiler.record_function`, the fallback for versions of torch
    without the pair. While torch's second backend records, the functions tell it the ranges as well, as
    `record_function` does: its lanes show these, not those of the pair.
    """
    import torch

    enter = getattr(torch.autograd, "_record_function_with_args_enter", None)
    leave = getattr(torch.autograd, "_record_function_with_args_exit", None)
    observer = cupti_observer()
    if enter is not None and leave is not None:
        return (enter, leave) if observer is None else _observed(enter, leave, observer)

    def enter_record_function(name: str, *_: Any) -> Any:
        record = torch.profiler.record_function(name)
        record.__enter__()
        return record

    return enter_record_function, lambda record: record.__exit__(None, None, None)


def cupti_observer() -> Any:
    """Return the object by which torch's second backend learns of ranges; None unless it records."""
    return getattr(sys.modules.get("torch.autograd.profiler"), "_active_cupti_profiler_observer", None)


def _observed(
    enter: Callable[..., Any], leave: Callable[[Any], None], observer: Any
) -> tuple[Callable[..., Any], Callable[[Any], None]]:
    def enter_observed(name: str, *shown: Any) -> Any:
        record = enter(name, *shown)
        observer.push_annotation(name)
        return record

    def leave_observed(record: Any) -> None:
        observer.pop_annotation()
        leave(record)

    return enter_observed, leave_observed


def running() -> bool:
    """Return whether a torch profiler records on this thread."""
    torch = sys.modules.get("torch")
    enabled = getattr(getattr(torch, "autograd", None), "_profiler_enabled", None)
    return bool(enabled()) if enabled is not None else False


def running_anywhere() -> bool:
    """Return whether a torch profiler records on any thread, as far as torch knows."""
    return bool(getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False))


def running_target() -> str | None:
    """Return the target, as `profiler_patches` names it, of the torch profiler that runs; None if none runs."""
    from torch.autograd import profiler

    if not getattr(profiler, "_is_profiler_enabled", False):
        return None
    kind = getattr(sys.modules["torch"]._C._autograd, "_profiler_type", None)
    return str(kind().name) if kind is not None else "KINETO"


def needs_nested_ranges(profiler: Any) -> bool:
    """Return whether ``profiler``, which starts, needs the ranges of a thread to end innermost first.

    True if it records a GPU, whose lane shows the ranges, or turns them into NVTX or ITT ranges. In a profile of
    the CPU alone they may end in any order, unless torch's second backend records the GPU beside it. True as well
    for an unknown profiler.
    """
    from torch.profiler import ProfilerActivity

    if cupti_observer() is not None:
        return True

    activities = getattr(profiler, "kineto_activities", None)
    return activities is None or bool(set(activities) - {ProfilerActivity.CPU})


def profiler_patches(started: Callable[[str, Any], None], stopped: Callable[[], None]) -> Iterator[Patch]:
    """Yield patches that call ``started(target, profiler)`` before a torch profiler starts, then ``stopped()``.

    ``target`` is what the profiler turns ranges into: "KINETO" (its own trace), "NVTX" or "ITT". There are no
    patches if this version of torch lacks the functions: windows and the program's own ``torch.profiler.profile``
    blocks then hold no regions.
    """
    from torch.autograd import profiler

    def starting(start: Callable[[], None]) -> Callable[[], None]:
        def run_on_profiler_start() -> None:
            caller = sys._getframe(1).f_locals.get("self")  # the profiler, in its __enter__
            started(_TARGETS.get(type(caller).__name__, "KINETO"), caller)
            start()

        return run_on_profiler_start

    def stopping(stop: Callable[[], None]) -> Callable[[], None]:
        def run_on_profiler_stop() -> None:
            try:
                stop()
            finally:
                stopped()

        return run_on_profiler_stop

    if hasattr(profiler, "_run_on_profiler_start") and hasattr(profiler, "_run_on_profiler_stop"):
        yield Patch(profiler, "_run_on_profiler_start", starting)
        yield Patch(profiler, "_run_on_profiler_stop", stopping)


def note_stop() -> None:
    """If this thread has no profiler, clear torch's flag that one is on, and call the `profiler_patches`.

    torch has one flag for all threads; call this only while no profiler of another thread records. torch sets the
    flag just before it enables a profiler and clears it just after disabling: an error or an interrupt in between
    leaves the flag set.
    """
    if running_anywhere() and not running():
        from torch.autograd import profiler

        profiler._run_on_profiler_stop()


def kineto_step(job: Mapping[str, Any] | None = None) -> None:
    """Count a step as torch's own profiler does; a step that several profilers count is one step.

    With ``job``, a trace that Kineto's daemon starts has it as "distributedInfo". Kineto forgets it after each
    trace, and does not say when one begins.
    """
    add = getattr(sys.modules.get("torch.autograd"), "_add_metadata_json", None)
    if add is not None and job is not None and not running_anywhere():  # else torch has written more
        add("distributedInfo", json.dumps(job))
    tracker = getattr(sys.modules.get("torch.autograd.profiler"), "KinetoStepTracker", None)
    if tracker is not None:
        tracker.increment_step("ProfilerStep")


@contextmanager
def suppress_cycle_warning() -> Iterator[None]:
    """Suppress torch's warning, when it prepares a profiler in the body, that earlier events are cleared.

    torch up to 2.11 also warns if there are none; a filter that raises warnings would end the recording.
    """
    from torch.profiler import profiler

    with ExitStack() as stack:
        if hasattr(profiler, "_WARNINGS_SHOWN"):
            Patch(profiler, "_WARNINGS_SHOWN", lambda _: _AllEventsShown()).apply_in(stack)
        yield


@contextmanager
def without_inductor() -> Iterator[None]:
    """Keep a torch profiler that prepares in the body from importing torch._inductor, which takes 1-2 s.

    It reads there whether inductor uses CUDA graphs: not before that is imported, unless the environment says so.
    """
    import torch
    from torch.profiler import profiler

    def has(owner: Any, name: str) -> bool:
        return not (owner is torch and name == "_inductor") and hasattr(owner, name)

    with ExitStack() as stack:
        if "torch._inductor" not in sys.modules and os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") != "1":
            Patch(profiler, "hasattr", lambda _: has).apply_in(stack)  # hides the built-in one
        yield


@contextmanager
def named_ranges_only() -> Iterator[None]:
    """Keep a torch profiler that starts in the body from recording operators; it records ranges that have a name.

    Calls of the GPU's runtime and its work are recorded as before: CUPTI and roctracer report them.
    """
    from torch._C._profiler import RecordScope
    from torch.autograd import profiler

    def enabling(enable: Callable[..., None]) -> Callable[[Any, Any], None]:
        return lambda config, activities: enable(config, activities, {RecordScope.USER_SCOPE})

    with ExitStack() as stack:
        Patch(profiler, "_enable_profiler", enabling).apply_in(stack)
        yield


def without_events(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a profile whose events are only exported, which spares torch a copy of them.

    Options that need the events, or that set ``experimental_config``, are returned unchanged.
    """
    from torch._C._profiler import _ExperimentalConfig

    unchanged = dict(options)
    if any(options.get(name) for name in ("experimental_config", "acc_events", "with_stack", "profile_memory")):
        return unchanged
    try:
        config = _ExperimentalConfig(trace_only=True)
    except TypeError:  # this version of torch always copies them
        return unchanged
    return {**unchanged, "experimental_config": config}


def custom_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a profile with ``custom_profiler_config`` where torch takes it.

    Raises:
        TypeError: it is neither a mapping nor a string.
        ValueError: there is an ``experimental_config`` as well, which holds it, or torch has no such backend.
    """
    from torch._C._profiler import _ExperimentalConfig

    others = dict(options)
    given = others.pop("custom_profiler_config", None)
    if given is None:
        return others
    if not isinstance(given, (str, Mapping)):
        raise TypeError(f'"custom_profiler_config" must be a dict, or a string: {given!r}')
    if others.get("experimental_config") is not None:
        raise ValueError(
            f'"custom_profiler_config" goes into "experimental_config" where both are given: {given!r}'
        )
    text = given if isinstance(given, str) else json.dumps(dict(given))
    try:
        return {**others, "experimental_config": _ExperimentalConfig(custom_profiler_config=text)}
    except TypeError:
        raise ValueError(f'this version of torch takes no "custom_profiler_config": {given!r}') from None


def has_second_backend(profiler: Any) -> bool:
    """Return whether this `torch.profiler.profile` records the GPU by torch's second backend, beside Kineto."""
    return bool(getattr(profiler, "_use_cupti_monitor", False))


def export_trace(profiler: Any, path: str) -> bool:
    """Have a `torch.profiler.profile` write its trace; torch's second backend writes it to ``path`` + ".gz".

    Returns:
        False if the trace is of the CPU alone: the second backend, which was to record the GPU, could not start.
    """
    observer = getattr(profiler, "_cupti_profiler_observer", None)
    if observer is not None and not observer.available:  # torch would write nothing
        profiler.profiler.export_chrome_trace(path)
        return False
    profiler.export_chrome_trace(path)
    getattr(profiler, "wait_for_exports", lambda: None)()  # with async export, another thread writes
    return True


def records_all_threads(options: Mapping[str, Any]) -> bool:
    """Return whether a profile with these options records every thread; no attribute says that."""
    from torch._C._profiler import _ExperimentalConfig

    given = options.get("experimental_config")
    if given is None:
        return False
    make: Any = _ExperimentalConfig
    try:
        states = make().__getstate__(), make(profile_all_threads=True).__getstate__()
        (at,) = (place for place, (off, on) in enumerate(zip(*states, strict=True)) if off != on)
        return bool(given.__getstate__()[at])
    except (TypeError, AttributeError, ValueError):  # another version of torch
        return False


class _AllEventsShown(set[str]):
    def __contains__(self, _: object) -> bool:
        return True


def accumulate_events(profiler: Any, before: Any) -> None:
    """Make ``profiler``, created with ``acc_events=True``, continue the events of the profiler ``before``."""
    profiler._old_function_events = before.function_events


def check_options(options: Mapping[str, Any]) -> None:
    """Raise now the errors for ``options`` that `torch.profiler.profile` raises only once a recording begins.

    Initializes no device before the program uses one.
    """
    import torch
    from torch.autograd import profiler
    from torch.profiler import ProfilerActivity

    activities = options.get("activities")
    if activities == []:  # older versions treat it as the default
        raise AssertionError("No valid profiler activities found")
    made = torch.profiler.profile(**{**options, "activities": _cpu() if activities is None else activities})
    for activity in made.activities:  # older versions check them later
        if not isinstance(activity, ProfilerActivity):
            raise TypeError(f"Expected ProfilerActivity, got {type(activity)}")
    if has_second_backend(made) and importlib.util.find_spec("cupti") is None:
        raise ImportError("torch's second backend needs the package cupti: pip install cupti-python")
    accepted = inspect.signature(profiler.profile).parameters
    names = (
        "record_shapes", "with_flops", "profile_memory", "with_stack", "experimental_config",
        "post_processing_timeout_s", "activity_filters",
    )  # fmt: skip
    given = {name: getattr(made, name) for name in names if name in accepted and hasattr(made, name)}
    in_use = gpu.in_use() is not None
    backend = profiler.profile(
        use_cpu=ProfilerActivity.CPU in made.activities or gpu.supported(),
        use_device=made.use_device if in_use or made.use_device == "mtia" else None,  # MTIA is refused if absent
        use_kineto=True,
        **given,
    )
    backend.config()
    # Only torch's C++ code knows the names of single activities. Its first recording decides whether this process
    # records a GPU, so none is tried before the program uses one.
    tried = (in_use or not gpu.supported()) and not (running() or running_anywhere())
    if given.get("activity_filters") and tried:
        backend.use_device = None  # it would be synchronized
        with backend:
            pass


def window_activities(given: Sequence[Any] | None) -> Sequence[Any]:
    """Return ``given``, or else the activities of the CPU, and of the GPU if the program uses one by now.

    torch's own default counts the devices, which initializes the driver.
    """
    import torch

    if given is not None:
        return given
    return _cpu() if gpu.in_use() is None else list(torch.profiler.supported_activities())


def _cpu() -> list[Any]:
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CPU]
