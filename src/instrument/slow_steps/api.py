"""`black_box`: says which steps of a running loop are slow, and in which phase, without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..arguments import integer
from ..guard import guard
from .box import FEATURE, BlackBox
from .phases import OTHER
from .slow_step import SlowStep
from .step_clock import BLOCK


def _inactive(*_: Any, **__: Any) -> BlackBox:
    return BlackBox()  # never started


@guard.prepared(FEATURE, otherwise=_inactive)
def black_box(
    steps: int = 1000,
    *,
    slow: float = 1.5,
    cooldown: int = 200,
    cap: int = 10,
    phases: Iterable[str] = (),
    first_step: int = 0,
    on_slow: Callable[[SlowStep], Any] | None = None,
) -> BlackBox:
    """Time the steps of a loop and their phases all the time; find slow steps, without a trace.

    A step ends where ``.step()`` of the returned box is called; without such calls, where a profile,
    `instrument.steps` or an adapter counts one, else after each step of the first optimizer. The phases are the
    regions called data, forward, backward, optimizer, evaluation or checkpoint, of `annotate`, `annotate_step`
    and the adapters. Without regions only the length of each step is known. The box runs until ``stop()``, or the
    end of its ``with`` block. Of several boxes each times for itself.

    A step is slow if it takes ``slow`` times as long as a usual step, and is more than 3.5 times the noise of the
    loop above it. The first 32 steps show what is usual.

    Args:
        steps: how many steps to keep.
        slow: the ratio to the usual time from which a step can be slow.
        cooldown: how many steps after an alarm no other is given, unless the step's delay is one and a half times
            that of the worst alarm in these.
        cap: the most alarms that are given in an hour, with the same exception.
        phases: further names of regions that are phases.
        first_step: the number of the first step.
        on_slow: called at each alarm, on the loop's thread, with the `SlowStep`.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message gives its name and value.

    Example:
        >>> with black_box() as box:
        ...     for batch in loader:
        ...         train_step(batch)
        ...         box.step()
        >>> print(box.report())
    """
    steps, cooldown = integer("steps", steps, BLOCK), integer("cooldown", cooldown)
    cap, first_step = integer("cap", cap), integer("first_step", first_step)
    if isinstance(slow, bool) or not isinstance(slow, (int, float)):
        raise TypeError(f'"slow" must be a number > 1: {slow!r}')
    if not 1 < slow < float("inf"):
        raise ValueError(f'"slow" must be a number > 1: {slow!r}')
    if isinstance(phases, str) or not isinstance(phases, Iterable):
        raise TypeError(f'"phases" must be several names of regions: {phases!r}')
    names = tuple(phases)
    if not all(isinstance(phase, str) and phase != OTHER for phase in names):
        raise ValueError(f'"phases" must be names of regions other than "{OTHER}": {phases!r}')
    if on_slow is not None and not callable(on_slow):
        raise TypeError(f'"on_slow" must be a function: {on_slow!r}')
    box = BlackBox(
        steps, slow=slow, cooldown=cooldown, cap=cap, phases=names, first_step=first_step, on_slow=on_slow
    )
    box.start(follow=True)
    return box
