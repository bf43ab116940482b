"""The marker ``budget`` and the fixtures ``counts`` and ``region_tree`` of the pytest plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..explain.contract.numbers import Numbers
    from ..explain.contract.region_tree import RegionTree
    from ..syncs.dryrun.report import DryRunReport

BUDGET = (
    "budget(syncs=0, kernels=..., flops=..., h2d_bytes=..., peak_mb=..., graph_breaks=0, collective_bytes=..., "
    "fake=False): fail if a step of the test does more on a GPU; **{'kernels.gemm': 12} for names with dots"
)
UPDATE = "--update-regions"
Runner = Callable[[Callable[[], object], bool, Iterable[Any]], "DryRunReport"]


def limits_of(item: pytest.Item) -> tuple[dict[str, Any], bool] | None:
    """Return the limits of a test and whether it has no data; None without a marker.

    Limits of the test come before those of its class, and these before those of its module.

    Raises:
        ValueError, TypeError: an argument is not accepted.
    """
    markers = list(item.iter_markers("budget"))
    if not markers:
        return None
    from ..explain.contract.numbers import check_limits

    limits: dict[str, Any] = {}
    for marker in reversed(markers):
        if marker.args:
            raise TypeError(f"it takes limits by name, such as syncs=0: {marker.args}")
        limits |= marker.kwargs
    fake = limits.pop("fake", False)
    if not isinstance(fake, bool):
        raise TypeError(f'"fake" must be True or False: {fake!r}')
    check_limits(limits)
    if not limits:
        raise ValueError("it needs a limit, such as syncs=0")
    return limits, fake


def reason_over(report: DryRunReport, limits: Mapping[str, Any]) -> str | None:
    """Return why a report is over limits; None if it is not.

    Raises:
        ValueError: a name is unknown.
    """
    return report.numbers.over(limits) or report.failure or None


def _without_failure(report: DryRunReport) -> DryRunReport:
    """Return a report, or fail the test if it cannot be compared."""
    __tracebackhide__ = True
    if report.failure:
        pytest.fail(report.failure, pytrace=False)
    return report


class StepCounter:
    """The value of the fixture ``counts``."""

    def __init__(self, run: Runner) -> None:
        self._run = run

    def __call__(self, step: Callable[[], object], *, fake: bool = False, on_gpu: Iterable[Any] = ()) -> Numbers:
        """Call ``step`` as if there were a GPU, and return what it does there: integers by name.

        Args:
            step: a function without arguments; its errors propagate.
            fake: whether only shapes are computed.
            on_gpu: modules, optimizers and tensors that are on the GPU before.
        """
        __tracebackhide__ = True
        return _without_failure(self._run(step, fake, on_gpu)).numbers


class Regions:
    """The value of the fixture ``region_tree``."""

    def __init__(self, run: Runner, folder: Path, update: bool) -> None:
        self._run = run
        self._folder = folder
        self._update = update

    def __call__(
        self,
        step: Callable[[], object],
        file: str | Path | None = None,
        *,
        fake: bool = False,
        on_gpu: Iterable[Any] = (),
    ) -> RegionTree:
        """Call ``step`` as if there were a GPU, and return its regions.

        Args:
            step: a function without arguments; its errors propagate.
            file: a file, relative to that of the test, that has the same regions, else the test fails. With
                ``pytest --update-regions`` it is written.
            fake: whether only shapes are computed.
            on_gpu: modules, optimizers and tensors that are on the GPU before.
        """
        __tracebackhide__ = True
        from ..explain.contract.region_tree import RegionTree

        tree = _without_failure(self._run(step, fake, on_gpu)).regions or RegionTree()
        if file is None:
            return tree
        path = self._folder / file
        if self._update:
            tree.write(path)
        elif not path.exists():
            pytest.fail(f"there is no {path}; pytest {UPDATE} writes it", pytrace=False)
        else:
            tree.assert_same(path)
        return tree
