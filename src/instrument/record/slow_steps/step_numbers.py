"""`StepNumbers`, and `every`, which says how often a function of `on_steps` gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...base.units import integer
from .judging import SlowStep

PREFIX = "instrument/"
"""How each name begins, so that dashboards group them."""
_DEFAULT_STEPS = 100
_MOST_STEPS = 100_000  # 300 bytes each are kept

Count = int | Callable[[], int]


class RecordedWindow(NamedTuple):
    """A window that a profile has recorded.

    Attributes:
        window: its number or name, as in the manifest.
        files: its files; another process may still be writing them.
        first_step: its first recorded step.
        last_step: its last recorded step.
        begin_ns: when recording began, in ns since the epoch.
        end_ns: when recording ended, in ns since the epoch.
    """

    window: int | str
    files: tuple[Path, ...]
    first_step: int
    last_step: int
    begin_ns: int
    end_ns: int


class StepNumbers(dict[str, int | float]):
    """The numbers of an interval of steps, by name: a flat dict, as loggers of metrics take it.

    Only what is known is in it. Times are in s, without evaluations, checkpoints, pauses and the work of this
    library. Neither the first step of a run, which includes what starts late, nor steps that a window records, nor
    steps that end in a pause are summed. The names, each after "instrument/":

    ``step``: the number of the last step. ``steps``: how many are summed.
    ``step_time_mean_s``, ``step_time_p50_s``, ``step_time_p99_s``, ``step_time_max_s``: the time of a step. The
    percentiles are those of the nearest rank, so the 99th of fewer than 100 steps is the maximum.
    ``slow_steps``: how many were slow, as `BlackBox.slow_steps` has them, not by an evaluation or a checkpoint.
    ``phase_NAME_s``: the time of a phase in a step, as a mean; of each phase that a region has shown so far, and
    of ``other``. Without ``phase_evaluation_s`` and ``phase_checkpoint_s`` they add up to ``step_time_mean_s``.
    ``syncs``, ``sync_wait_s``: how often and how long the CPU waited for the GPU in a step, as means over those
    that `detect_syncs` checked meanwhile.
    ``samples_per_s``, ``tokens_per_s``: of this process.
    ``memory_peak_bytes``: the most GPU memory of tensors on the current device, since the program itself last
    reset that.
    ``windows``: how many were recorded so far.

    Args:
        numbers: the numbers, by name.
        first_step: the number of the first step of the interval.
        durations_ns: the times of the summed steps, in order.
        slow_steps: the slow steps, in order.
        windows: the windows that were recorded since the last call.
        rank: of this process in its job.
        world_size: the number of ranks of the job; 1 outside one.
        run: the folder of the profile; None for a black box.
        totals: the ``samples`` and ``tokens`` that all steps of the interval took, and the ``syncs`` and their
            ``sync_wait_s`` in those that were checked; what is known of these.

    Attributes: as the arguments.
    """

    def __init__(
        self,
        numbers: Mapping[str, int | float],
        *,
        first_step: int = 0,
        durations_ns: Sequence[int] = (),
        slow_steps: Sequence[SlowStep] = (),
        windows: Sequence[RecordedWindow] = (),
        rank: int = 0,
        world_size: int = 1,
        run: Path | None = None,
        totals: Mapping[str, int | float] = {},
    ) -> None:
        super().__init__(numbers)
        self.first_step = first_step
        self.durations_ns = durations_ns
        self.slow_steps = slow_steps
        self.windows = windows
        self.rank = rank
        self.world_size = world_size
        self.run = run
        self.totals = dict(totals)


@dataclass(frozen=True)
class Every:
    """A function of ``on_steps``, with the arguments of `every`."""

    steps: int
    function: Callable[[StepNumbers], Any]
    counts: Mapping[str, Count | None]  # samples and tokens


def every(
    steps: int,
    function: Callable[[StepNumbers], Any],
    samples: Count | None = None,
    tokens: Count | None = None,
) -> Every:
    """Return an argument ``on_steps``: ``function`` gets the numbers of each ``steps`` steps, as `StepNumbers`.

    Args:
        steps: how many steps lie between two calls, up to 100,000. The function is called after the step by which
            the number of steps done is a multiple of this, on the thread of the loop, and once more for the steps
            that are left when the loop ends, but not where no step was timed. Its time is part of no step.
        function: is called with the numbers. If it has a method ``close``, that is called when the run ends; a
            later run in the same process, as a second training, calls the function again.
        samples: how many samples this process takes in a step, or a function that returns how many it took so far.
        tokens: how many tokens, likewise.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message gives its name and value.

    Example:
        >>> for batch in instrument.steps(loader, on_steps=instrument.every(50, wandb.log, samples=256)):
        ...     train_step(batch)
    """
    if not callable(function):
        raise TypeError(f'"function" must be a function: {function!r}')
    steps = integer("steps", steps, least=1)
    if steps > _MOST_STEPS:
        raise ValueError(f'"steps" must be an integer <= {_MOST_STEPS}: {steps!r}')
    counts = {"samples": samples, "tokens": tokens}
    for name, count in counts.items():
        if count is not None and not callable(count):
            counts[name] = integer(name, count, least=1, why=" or a function")
    return Every(steps, function, counts)


OnSteps = Callable[[StepNumbers], Any] | Every | Iterable[Callable[[StepNumbers], Any] | Every] | None
"""What ``on_steps`` takes."""


def chosen_functions(on_steps: OnSteps) -> tuple[Every, ...] | None:
    """Return the functions that ``on_steps`` names, None if it is not given; every 100 steps is the default.

    Raises:
        TypeError: it names something else.
    """
    if on_steps is None:
        return None
    functions = list[Every]()
    several: Iterable[Any] = on_steps if isinstance(on_steps, Iterable) and not callable(on_steps) else [on_steps]
    for each in several:
        if callable(each):
            functions.append(every(_DEFAULT_STEPS, each))
        elif isinstance(each, Every):
            functions.append(each)
        elif each is not None:
            raise TypeError(f'"on_steps" must be a function, an instrument.every(...), or several: {on_steps!r}')
    return tuple(functions)
