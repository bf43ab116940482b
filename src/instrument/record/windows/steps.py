"""`steps`: records windows of an existing loop by wrapping what it iterates over."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...base import log
from ...base.guard import guard
from ...base.units import integer
from ..planning.schedule import NOTHING, Schedule, span
from ..planning.schedule import SCHEDULE_OPTIONS as SCHEDULE_OPTIONS
from ..planning.schedule import schedule as make_schedule
from ..regions.annotation import annotate
from .api import Driver, folder_of, new_profile, uncounted_profile
from .profile import Profile, models_in
from .window_recorder import FEATURE

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from .api import ProfileArguments

T = TypeVar("T")
CYCLE = {"wait": 1, "warmup": 1, "active": 3}
"""The default schedule."""
_DRIVER = Driver(steps_hint='at="{}"', keeps_events=False)  # users of a loop read no events in memory


class LoopStepCounter:
    """Counts the steps of one loop, through all its epochs.

    Attributes:
        profile: records the steps.
        schedule: the schedule, in a form that can be compared.
        first: the given number of the first step.
        arguments: the other arguments of the profile.
        cell: the number of the notebook's cell that made it: a cell that runs again is another run.
        running: whether the loop is running.
        step_open: whether the step of the current item has not ended.
    """

    def __init__(self, profile: Profile, schedule: Any, first: int, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.profile = profile
        self.schedule = schedule
        self.first = first
        self.cell = _running_cell()
        self.running = False
        self.step_open = False
        self._updates = 0  # of all optimizers, for the current item
        self._max_updates = 0  # the most updates of an item so far; 0 until one was followed
        self._follower: Any = None
        self._recorded_parameter: weakref.ref[Any] | None = None  # a parameter of the training that was recorded
        # The loop began after the last window, and its parameters are not known yet
        self._after_last_window = False
        self._warned = False

    def enter(self) -> None:
        """Begin the loop: its first epoch, another one, or another training at the same call site."""
        self._after_last_window = (
            self._recorded_parameter is not None and self.profile.finished and not self._warned
        )

    def end_step(self) -> None:
        """End the step of the current item, if it has not ended with an update."""
        if self.step_open:
            self.step_open = False
            self.profile.step()

    @property
    def follows_optimizers(self) -> bool:
        """Whether optimizers are followed or will be."""
        return self._follower is not None or self._after_last_window

    @guard.contained(FEATURE)
    def begin_step(self) -> None:
        """Begin the step of an item; follow the optimizers if a window is near."""
        self._max_updates, self._updates = max(self._max_updates, self._updates), 0
        near = self.profile.window_near or (self._after_last_window and self._follower is None)
        if near and self._follower is None and "torch" in sys.modules:
            from ..stepping.optimizer_steps import OptimizerSteps  # imports torch

            self._follower = OptimizerSteps(self._on_update, every=True)
            self._follower.follow()
        elif not near:
            self.leave()

    def pause(self, *, left: bool) -> None:
        """Pause the profile at the end of the loop; an open step with fewer updates than others counts as cut.

        Args:
            left: the program left the loop before its last item.
        """
        begun = not self.step_open
        self.profile.pause(begun=begun, cut=not begun and self._updates < self._max_updates, left=left)

    @guard.contained(FEATURE)
    def leave(self) -> None:
        """Stop following the optimizers."""
        follower = self._follower
        if follower is not None:
            follower.remove()
            self._follower = None
            self._warn_if_parameters_differ(follower.parameters)

    def _warn_if_parameters_differ(self, parameters: Sequence[Any]) -> None:
        """Warn if a loop after the last window trains different parameters from the recorded loop."""
        if not parameters or self._warned:
            return
        if not self._after_last_window or self._recorded_parameter is None:
            self._recorded_parameter = weakref.ref(parameters[0])
            return
        self._after_last_window, trained = False, self._recorded_parameter()
        recorded = [entry["steps"] for entry in self.profile.windows if entry["steps"]]
        if not recorded or any(parameter is trained for parameter in parameters):
            return
        self._warned = True
        one = len(recorded) == 1 and recorded[0][0] == recorded[0][1]
        spans = ",".join(span(first, last + 1) for first, last in recorded[:10])
        log.warning(
            f"{'step' if one else 'steps'} {spans} {'was' if one else 'were'} recorded in an earlier loop at this"
            " call site, so nothing is recorded here; use another folder for this training"
        )

    def _on_update(self) -> None:
        """Count an update; the last update of an item ends its step."""
        self._updates += 1
        if self._updates == self._max_updates:
            self.end_step()


def _running_cell() -> int | None:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "execution_count", None)


class StepIterator(Generic[T]):
    """The items of ``iterable``, each a step of ``profile``. Iterating again, as for an epoch, counts on."""

    def __init__(
        self,
        iterable: Iterable[T],
        counter: LoopStepCounter,
        again: Callable[[], LoopStepCounter],
        accumulate: int = 1,
    ) -> None:
        self._iterable = iterable
        self._counter = counter
        self._make_counter = again  # makes another count, for a nested or concurrent loop
        self._accumulate = accumulate

    @property
    def profile(self) -> Profile:
        """The profile that records the steps."""
        return self._counter.profile

    def __iter__(self) -> Iterator[T]:
        with guard.contained(FEATURE):
            if self._counter.running:
                self._counter = self._make_counter()
        counter = self._counter
        profile = counter.profile
        counter.end_step()  # of the last item, if the previous loop was left in its body
        profile.start()
        profile.begin_epoch()
        counter.enter()
        counter.running = True
        step, left = profile.step, False
        try:
            for item in self._items():
                if profile.window_near or counter.follows_optimizers:
                    counter.begin_step()
                counter.step_open = True
                yield item
                if counter.step_open:
                    counter.step_open = False
                    step()
        except GeneratorExit:
            left = True
            raise
        finally:
            counter.leave()
            counter.running = False
            counter.pause(left=left)
            counter.leave()  # again, in case the first call failed

    def _items(self) -> Iterable[Any]:
        return self._iterable

    def __bool__(self) -> bool:
        return True  # a generator has no length to decide by

    def __dir__(self) -> list[str]:
        return ["profile"]

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


class MicroStepIterator(StepIterator[T]):
    """The items of ``iterable``, each in a region "micro-step"; every ``accumulate`` of them are a step."""

    def __iter__(self) -> Iterator[T]:
        groups: Iterator[Any] = super().__iter__()
        for group in groups:
            for item in group:
                with annotate("micro-step"):
                    yield item

    def _items(self) -> Iterator[Iterator[T]]:
        """Yield groups of items, which are loaded as the group is iterated over; the last one may be smaller."""
        items = iter(self._iterable)
        for first in items:
            yield chain((first,), islice(items, self._accumulate - 1))


_counters: weakref.WeakKeyDictionary[CodeType, dict[tuple[str, int, Path], LoopStepCounter]] = (
    weakref.WeakKeyDictionary()
)
"""The loops of this process: by the calling code, its file, the position in it, and the folder.

The file is part of the key because equal code in two files, such as notebook cells, compares equal.
"""


def _inactive_counter() -> LoopStepCounter:
    return LoopStepCounter(uncounted_profile(), None, 0, {})


def _inactive_steps(iterable: Iterable[T], *_: Any, **__: Any) -> StepIterator[T]:
    return StepIterator(iterable, _inactive_counter(), _inactive_counter)


@guard.prepared(FEATURE, otherwise=_inactive_steps)
def steps(
    iterable: Iterable[T],
    out: str | os.PathLike[str] = "runs/instrument",
    *,
    schedule: Schedule | str | Callable[[int], Any] | None = None,
    wait: int | None = None,
    warmup: int | None = None,
    active: int | None = None,
    repeat: int | None = None,
    skip_first: int | None = None,
    skip_first_wait: bool | int | None = None,
    at: str | int | Iterable[int] | None = None,
    every: int | None = None,
    accumulate: int = 1,
    modules: nn.Module | Iterable[nn.Module] | None = None,
    **arguments: Unpack[ProfileArguments],
) -> StepIterator[T]:
    """Iterate over ``iterable``, one step for each item, and record the planned steps.

    A step ends with the last optimizer step of its item or, if that is not known, when the loop requests the next
    item. Code after it, such as logging and loading an item, belongs to the next step. Between two loops nothing
    is recorded. Steps are counted through epochs: a call at the same call site, with the same folder and schedule,
    continues the count and the windows.

    Args:
        iterable: the items, usually a DataLoader.
        out: the folder for the windows, as for `profile`.
        schedule: a schedule as for `profile`, instead of the arguments up to ``every``.
        wait: as for `instrument.schedule`. If none of the arguments from this one to ``every`` is given, the
            schedule is wait=1, warmup=1, active=3.
        warmup: as for `instrument.schedule`.
        active: as for `instrument.schedule`.
        repeat: as for `instrument.schedule`, but 1 is the default for cycles (0: no limit).
        skip_first: as for `instrument.schedule`.
        skip_first_wait: as for `instrument.schedule`.
        at: as for `instrument.schedule`.
        every: as for `instrument.schedule`.
        accumulate: the number of items whose gradients are accumulated for one update, which are one step; each
            item is then a region "micro-step". The items at the end of ``iterable`` may be fewer.
        modules: the model, as for `profile`: its modules and the parts of the step become regions.
        arguments: other arguments of `profile`.

    Raises:
        TypeError, ValueError: as `instrument.schedule` and `profile`.

    Example:
        >>> for batch in steps(loader, "runs/bert", wait=1, warmup=1, active=3):
        ...     train_step(batch)
    """
    named = {name: value for name, value in locals().items() if name in SCHEDULE_OPTIONS}
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise TypeError(f'"iterable" must be iterable: {iterable!r}')
    models = models_in(modules)
    folder, accumulate = folder_of(out), integer("accumulate", accumulate, least=1)
    chosen = schedule_of(schedule, named, requested=asked(arguments))
    first = arguments.get("first_step", 0)

    def make() -> LoopStepCounter:
        profile = new_profile(_DRIVER, out, schedule=chosen, **arguments)
        profile.annotate(models)
        return LoopStepCounter(profile, _comparable_schedule(chosen), first, arguments)

    frame = sys._getframe(2)  # the caller of the containment around this function
    places = _counters.setdefault(frame.f_code, {})
    place = frame.f_code.co_filename, frame.f_lasti, folder
    counter = places.get(place)
    if (
        counter is not None
        and counter.schedule == _comparable_schedule(chosen)
        and first in (counter.first, counter.profile.step_num)
        and counter.cell == _running_cell()
    ):
        if counter.arguments != arguments:
            make()  # checks them
        counter.profile.annotate(models)  # not an argument, which would keep a model alive
    else:
        counter = places[place] = make()
    kind = StepIterator if accumulate == 1 else MicroStepIterator
    return kind(iterable, counter, make, accumulate)


def _comparable_schedule(schedule: Any) -> Any:
    """Return ``schedule`` in a form that can be compared: functions created in each epoch are not equal."""
    if not inspect.isfunction(schedule):
        return schedule
    try:
        held = [cell.cell_contents for cell in schedule.__closure__ or ()]
    except ValueError:  # an empty cell
        return schedule
    return schedule.__code__, schedule.__defaults__, held


def asked(arguments: Mapping[str, Any]) -> bool:
    """Return whether something else than a schedule opens windows, or none are needed."""
    given = arguments.get("on_steps") is not None
    return given or bool(arguments.get("triggers") or arguments.get("black_box"))


def schedule_of(
    schedule: Schedule | str | Callable[[int], Any] | None, named: Mapping[str, Any], *, requested: Any = None
) -> Schedule | str | Callable[[int], Any]:
    """Return ``schedule``, or that of the arguments ``named``: by default one window, or none if others open it.

    Raises:
        TypeError, ValueError: as `instrument.schedule`; or both are given.
    """
    given = {name: value for name, value in named.items() if value is not None}
    if schedule is not None:
        if given:
            raise ValueError(f'"schedule" cannot be combined with: {", ".join(given)}')
        return schedule
    if requested and not given:
        return NOTHING
    given = given or dict(CYCLE)
    if "at" not in given and "every" not in given:
        given.setdefault("repeat", 1)
    return make_schedule(**given)
