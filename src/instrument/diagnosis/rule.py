"""Rules: functions that read the facts of a trace and yield findings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

from ..findings import Finding

GROUP = "instrument.rules"
"""The group of entry points whose modules define rules."""

Function = TypeVar("Function", bound=Callable[..., Iterable[Finding]])


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        name: the name, in lower case with hyphens.
        function: takes `TraceFacts` and the thresholds as keywords, and yields findings.
        on_cpu: whether its times are measured on the CPU, where a profiler inflates them.
    """

    name: str
    function: Callable[..., Iterable[Finding]]
    on_cpu: bool = False

    @property
    def thresholds(self) -> dict[str, Any]:
        """The thresholds with their defaults: the keyword-only parameters of the function."""
        parameters = inspect.signature(self.function).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}

    def check(self, values: Mapping[str, Any]) -> None:
        """Check thresholds that a user gives.

        Raises:
            TypeError: ``values`` is not a mapping.
            ValueError: a name that the rule does not have, or a value that is not a finite number.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f'"thresholds" of the rule "{self.name}" must be a mapping to numbers: {values!r:.200}'
            )
        for name, value in values.items():
            if name not in self.thresholds:
                known = ", ".join(self.thresholds) or "none"
                raise ValueError(f'the rule "{self.name}" has no threshold {name!r}; it has: {known}')
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(
                    f'the threshold "{name}" of the rule "{self.name}" must be a finite number: {value!r}'
                )


RULES: dict[str, Rule] = {}
"""The rules by name, in order of definition."""


def rule(name: str, *, on_cpu: bool = False) -> Callable[[Function], Function]:
    """Register the decorated function as a rule.

    The function takes a `TraceFacts`, and thresholds as keyword-only arguments with defaults; it yields findings.
    It raises `MissingEvidenceError` if the trace lacks what it needs. What raises another error, or yields what is
    not a finding, is listed in `Diagnosis.failed`. A later rule of the same name replaces the earlier one;
    `Diagnosis.replaced` lists the rules of the library that were replaced.

    Args:
        name: the name of the rule, in lower case with hyphens.
        on_cpu: whether its times are measured on the CPU, where a profiler inflates them.

    Example:
        >>> @rule("many-fills")
        ... def many_fills(facts, *, most=100):
        ...     fills = facts.rows(facts.trace.operators, "aten::fill_")
        ...     if len(fills) > most * facts.steps:
        ...         number = Evidence("fills", len(fills) / facts.steps, "events", "Fills per step.")
        ...         yield facts.finding("Tensors are filled again and again", win_ns=None, evidence=[number])

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: ``name`` is not in lower case with hyphens.
    """
    if not isinstance(name, str):
        raise TypeError(f'"name" must be a string: {name!r}')
    if not name.replace("-", "").isalnum() or name != name.lower():
        raise ValueError(f'"name" must be in lower case with hyphens: {name!r}')

    def register(function: Function) -> Function:
        RULES[name] = Rule(name, function, on_cpu)
        return function

    return register


def load_rules() -> Iterator[tuple[str, BaseException]]:
    """Import the modules of the entry points of `GROUP`, once each; yield those that fail."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except (Exception, SystemExit) as error:  # somebody else's module must not stop a diagnosis
            yield point.name, error
