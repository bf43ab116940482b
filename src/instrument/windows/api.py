"""`profile`: checks its arguments and makes a `Profile`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..exporters.capture import Exporter
from ..exporters.choose import choose
from ..guard import guard
from .profile import FEATURE, NEVER, Profile
from .schedule import Schedule, schedule
from .torch_schedule import FromTorch


def unmade(*_: Any, **__: Any) -> Profile:
    """Return what stands for a profile that could not be made."""
    made = Profile.__new__(Profile)
    made._metadata = {}
    return made


@guard.prepared(FEATURE, otherwise=unmade)
def profile(
    out: str | os.PathLike[str] = "runs/instrument",
    *,
    schedule: Schedule | str | Callable[[int], Any] | None = None,
    on_trace_ready: Callable[[Profile], Any] | None = None,
    exporter: str | Exporter = "auto",
    ranks: Iterable[int] | None = None,
    first_step: int = 0,
    **options: Any,
) -> Profile:
    """Record chosen steps of a training loop; call ``.step()`` on what this returns after each step.

    Each window lands in ``OUT/window-0001/`` as ``rank0.TIME.pt.trace.json.gz``, which opens in Perfetto,
    chrome://tracing and TensorBoard; ``OUT/manifest.jsonl`` has the outcome of each. After the last window a
    summary is printed to stderr. No failure of the recording reaches the loop.

    Args:
        out: the folder.
        schedule: what `instrument.schedule` returns, or steps by name ("10-12"), or a function of a step's
            number such as `torch.profiler.schedule` returns; None records everything in one window.
        on_trace_ready: called at the end of each window, on the loop's thread, with what this returns.
        exporter: "auto", "torch_profiler", "nsight_systems", "nsight_compute", "rocprof" or "vtune"; auto is that
            of the vendor's tool which the process runs under, else torch.profiler.
        ranks: the ranks that record; None for all. Others take part in nothing and wait for nobody.
        first_step: the number of the first step, for a run that is resumed. Named steps and periods of a
            schedule count from 0 all the same, cycles (wait, warmup, active) from here.
        options: as `torch.profiler.profile` takes them: ``activities``, ``record_shapes``,
            ``profile_memory``, ``with_stack``, ``with_flops``, ``experimental_config``, ... Without
            ``activities``, the CPU and, where the program uses it when a window begins, the GPU.

    Raises:
        TypeError, ValueError: an argument that is not accepted; the message gives its name and value.

    Example:
        >>> with profile("runs/bert", schedule=schedule(wait=1, warmup=1, active=3, repeat=2)) as prof:
        ...     for batch in loader:
        ...         train_step(batch)
        ...         prof.step()
    """
    folder = folder_of(out)
    if isinstance(first_step, bool) or not isinstance(first_step, int) or first_step < 0:
        raise ValueError(f'"first_step" must be an integer >= 0: {first_step!r}')
    if on_trace_ready is not None and not callable(on_trace_ready):
        raise TypeError(f'"on_trace_ready" must be a function: {on_trace_ready!r}')
    if ranks is not None and not isinstance(ranks, Iterable):
        raise TypeError(f'"ranks" must be several integers, such as [0]: {ranks!r}')
    chosen = None if ranks is None else frozenset(ranks)
    if chosen is not None and not (chosen and all(isinstance(rank, int) and rank >= 0 for rank in chosen)):
        raise ValueError(f'"ranks" must hold integers >= 0: {ranks!r}')
    plan = _plan(schedule, first_step)
    made = Profile(folder, plan, choose(exporter, options), on_trace_ready, chosen, first_step)
    made._planned = schedule is not None
    return made


def folder_of(out: Any) -> Path:
    """Return the folder ``out`` as an absolute path, as the program may change its own.

    Raises:
        TypeError: it is not a path.
    """
    if not isinstance(out, (str, os.PathLike)):
        raise TypeError(f'"out" must be the path of a folder: {out!r}{_hint(out)}')
    return Path(out).absolute()


def _hint(out: object) -> str:
    return '; the schedule goes into "schedule": profile("runs/x", schedule=...)' if callable(out) else ""


def _plan(given: Schedule | str | Callable[[int], Any] | None, first_step: int) -> Schedule | FromTorch:
    if given is None:
        return schedule(at=first_step, active=NEVER)
    if isinstance(given, str):
        given = schedule(given)
    if isinstance(given, Schedule):
        return given.starting(first_step)
    if callable(given):
        return FromTorch(given, first_step)
    raise TypeError(f'"schedule" must be an instrument.schedule(...) or a function of a step\'s number: {given!r}')
