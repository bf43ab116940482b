"""`ProfileOptions` and `Driver`: what a profile was asked for, and by which kind of code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ...base.units import integer
from ..allocator_history.options import MemoryHistory, chosen_history
from ..exporters.exporter import Exporter
from ..exporters.torch_profiler import Detail
from ..handover.storage import Keep
from ..planning.ranks import chosen_ranks
from ..slow_steps.step_numbers import Every, chosen_functions


@dataclass
class ProfileOptions:
    """The arguments of `profile` beside the folder, the schedule and the modules; ``torch`` has those of torch.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """

    on_trace_ready: Callable[[Any], Any] | None = None
    on_summary: Callable[[str], None] | None = None
    diagnose: bool = False
    detail: Detail = "operators"
    compile_log: bool = False
    memory: MemoryHistory | None = None
    exporter: str | Exporter = "auto"
    ranks: frozenset[int] | None = None
    first_step: int = 0
    triggers: str | Iterable[str] = ()
    trigger_steps: int = 3
    black_box: bool = False
    on_steps: Sequence[Every] | None = None
    keep: Keep | None = None
    upload: str | None = None
    upload_timeout: float = 60.0
    torch: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ProfileOptions:
        """Return the options for arguments of `profile`; those that are not its own are torch's."""
        own = {each.name for each in fields(cls)} - {"torch"}
        torch = {name: value for name, value in arguments.items() if name not in own}
        return cls(**{name: arguments[name] for name in own & arguments.keys()}, torch=torch)

    def __post_init__(self) -> None:
        self.first_step = integer("first_step", self.first_step)
        for name in ("on_trace_ready", "on_summary"):
            callback = getattr(self, name)
            if callback is not None and not callable(callback):
                raise TypeError(f'"{name}" must be a function: {callback!r}')
        for name in ("diagnose", "black_box", "compile_log"):
            flag = getattr(self, name)
            if not isinstance(flag, bool):
                raise TypeError(f'"{name}" must be True or False: {flag!r}')
        self.on_steps = chosen_functions(self.on_steps)
        self.trigger_steps = integer("trigger_steps", self.trigger_steps, least=1)
        self.memory, self.ranks = chosen_history(self.memory), chosen_ranks(self.ranks)


@dataclass(frozen=True)
class Driver:
    """Properties of the code that drives a profile: the user's calls of ``step``, a loop or an adapter.

    Args:
        steps_hint: how the user writes the steps to record, with "{}" for the steps; for messages.
        preemptible: the profile stops when another one starts, and does not start while another one runs.
        keeps_events: whether the last window's events stay in memory for calls after the loop.
        phase: the name of a phase of the program, which the names of windows begin with; empty for training steps.
        phase_of: the run in the manifest that the phase belongs to; empty for training steps.
    """

    steps_hint: str = 'schedule="{}"'
    preemptible: bool = False
    keeps_events: bool = True
    phase: str = ""
    phase_of: str = ""

    @property
    def marks_steps(self) -> bool:
        """Whether the program marks the steps of its training with the profile."""
        return not (self.preemptible or self.phase)

    @property
    def steps_by_hand(self) -> bool:
        """Whether the user's own code calls ``step()``."""
        return self.steps_hint.startswith("schedule")

    @property
    def on_command_line(self) -> bool:
        """Whether the user has the options of `instrument run`, and not the arguments of a function."""
        return self.steps_hint.startswith("--")
