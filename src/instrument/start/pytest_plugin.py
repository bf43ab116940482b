"""pytest plugin: fails tests whose code makes the CPU wait for the GPU, or does more on it than it may.

    @pytest.mark.syncs(max=0, fake=False)   # the body of the test, except inside `instrument.allow_sync`
    def test_step(): ...

    def test_step(syncs):                   # a part of it
        report = syncs(step)
        report.assert_max(1)

    @pytest.mark.budget(syncs=0, kernels=40, peak_mb=80)   # what a step of the test may do on a GPU
    def test_step(): ...

    def test_step(counts):                                 # a part of it
        counts(step).assert_max(kernels=40)

    def test_step(region_tree):                            # the regions of a step are those in a file
        region_tree(step, "regions.txt")

Without a GPU, the first two use a dry run; the others always do. torch is imported only for tests that use one.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

from . import pytest_budget
from .pytest_budget import Regions, StepCounter, limits_of, reason_over

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from ..explain.waits.report import SyncReport
    from ..syncs.dryrun.report import DryRunReport

_MARKER = (
    "syncs(max=0, fake=False): fail if the test makes the CPU wait for the GPU more than `max` times in a step"
)
_ARGUMENTS = ("max", "fake")
Check = Callable[[Any], "str | None"]
"""Returns why a report is refused; None if it is not."""
Report = TypeVar("Report")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line("markers", _MARKER)
    config.addinivalue_line("markers", pytest_budget.BUDGET)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes files of regions."""
    group = parser.getgroup("instrument")
    group.addoption(
        pytest_budget.UPDATE,
        action="store_true",
        help="write the files that the fixture region_tree compares with",
    )


@pytest.fixture
def syncs() -> Syncs:
    """Return an object that runs a function and reports where the CPU waits for the GPU."""
    return Syncs()


@pytest.fixture
def counts() -> StepCounter:
    """Return an object that runs a function and counts what it does on a GPU."""
    return StepCounter(_dry_report)


@pytest.fixture
def region_tree(request: pytest.FixtureRequest) -> Regions:
    """Return an object that runs a function and holds its regions to a file."""
    return Regions(_dry_report, request.path.parent, request.config.getoption(pytest_budget.UPDATE))


class Syncs:
    """The value of the fixture ``syncs``."""

    def __call__(
        self, step: Callable[[], object], *, fake: bool = False, on_gpu: Iterable[Any] = ()
    ) -> SyncReport:
        """Call ``step`` and return the report: of live detection if there is a GPU, else of a dry run.

        Args:
            step: a function without arguments; its errors propagate.
            fake: whether a dry run computes shapes only.
            on_gpu: modules, optimizers and tensors to move to the GPU before, modules first.
        """
        __tracebackhide__ = True
        return _reraising(step, lambda body: _report_on(body, fake, on_gpu))

    @staticmethod
    def allow(reason: str) -> AbstractContextManager[None]:
        """Allow synchronizations in this block, like `instrument.allow_sync`."""
        from ..syncs.policy import allow_sync

        return allow_sync(reason)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # "wrapper" is not known before pytest 8
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Check what a marked test does."""
    __tracebackhide__ = True
    _check_spelling(item)
    marker, budget = item.get_closest_marker("syncs"), _budget(item)
    if marker is None and budget is None:
        yield
        return
    checks: list[Check] = []
    fake = False
    if marker is not None:
        most, fake = _arguments(marker)
        checks.append(lambda report: _over(report, most))
    if budget is not None:
        limits, fake = budget[0], fake or budget[1]
        checks.append(lambda report: _over_budget(report, limits))
    if not isinstance(item, pytest.Function) or inspect.iscoroutinefunction(item.obj):
        which = "budget" if marker is None else "syncs"
        _refuse(f"the marker {which} takes plain functions, not coroutines: {item.nodeid}")
    test = item.obj
    report_on = _report_on if budget is None else _dry_run
    item.obj = functools.wraps(test)(
        functools.partial(_run, item, test, lambda body: report_on(body, fake, ()), checks)
    )
    try:
        yield
    finally:
        item.obj = test


def _over(report: SyncReport, most: int) -> str | None:
    reason = report.over(most)
    return None if reason is None else f"{reason}\n\n{report}"


def _budget(item: pytest.Item) -> tuple[dict[str, Any], bool] | None:
    try:
        return limits_of(item)
    except (TypeError, ValueError) as error:
        _refuse(f"@pytest.mark.budget: {error}")


def _over_budget(report: Any, limits: dict[str, Any]) -> str | None:
    try:
        return reason_over(report, limits)
    except ValueError as error:
        _refuse(f"@pytest.mark.budget: {error}")


def _check_spelling(item: pytest.Item) -> None:
    """Refuse a marker that nobody registered and that resembles one of ours, in its arguments as well."""
    registered = {re.split(r"[(:]", line)[0].strip() for line in item.config.getini("markers")}
    for marker in item.iter_markers():
        near = difflib.get_close_matches(marker.name, ["syncs", "budget"], n=1, cutoff=0.7)
        if not near or marker.name in registered:
            continue
        ours = near[0] == "budget" or set(marker.kwargs) <= set(_ARGUMENTS)
        if ours and (marker.kwargs or marker.name not in ("sync", "async")):
            _refuse(f"there is no marker {marker.name}; did you mean @pytest.mark.{near[0]}?")


def _run(
    item: pytest.Item,
    test: Callable[..., Any],
    report_on: Callable[[_Body], Any],
    checks: Iterable[Check],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run the body of a marked test; its own failure takes precedence."""
    __tracebackhide__ = True
    body = _Body(functools.partial(test, *args, **kwargs))
    report = report_on(body)
    if body.error is not None:
        item.add_report_section("call", "syncs", str(report))
        body.reraise()
    reasons = [reason for check in checks if (reason := check(report)) is not None]
    if reasons:
        _refuse("\n\n".join(reasons))


def _refuse(message: str) -> NoReturn:
    pytest.fail(message, pytrace=False)


class _Body:
    """A function whose error is kept, with a traceback that begins in it."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self.error: Exception | SystemExit | None = None
        self._traceback: TracebackType | None = None

    def __call__(self) -> None:
        try:
            self._function()
        except (Exception, SystemExit) as error:
            self.error, self._traceback = error, error.__traceback__
            raise

    def reraise(self) -> None:
        """Raise the error of the function, without the frames of the detector."""
        __tracebackhide__ = True
        if self.error is not None:
            raise self.error.with_traceback(self._traceback and self._traceback.tb_next)


def _reraising(step: Callable[[], object], report_on: Callable[[_Body], Report]) -> Report:
    """Return the report on a function, whose error propagates."""
    __tracebackhide__ = True
    body = _Body(step)
    report = report_on(body)
    body.reraise()
    return report


def _dry_report(step: Callable[[], object], fake: bool, on_gpu: Iterable[Any]) -> DryRunReport:
    __tracebackhide__ = True
    return _reraising(step, lambda body: _dry_run(body, fake, on_gpu))


def _dry_run(body: _Body, fake: bool, on_gpu: Iterable[Any]) -> DryRunReport:
    __tracebackhide__ = True
    from ..syncs.dryrun.run import dry_run

    return dry_run(body, fake=fake, on_gpu=on_gpu)


def _report_on(body: _Body, fake: bool, on_gpu: Iterable[Any]) -> SyncReport:
    __tracebackhide__ = True
    import torch

    if not torch.cuda.device_count():  # queries NVML if it can: is_available initializes the driver
        return _dry_run(body, fake, on_gpu)
    from ..syncs import coverage
    from ..syncs.live import detect_syncs

    for one in on_gpu:
        _to_gpu(one)
    with detect_syncs(level="log", every=1) as detector:
        body()
    report = detector.report
    if report.unavailable_reason == coverage.UNUSED:  # there is a GPU, but the test did not use it
        report.unavailable_reason = ""
    return report


def _to_gpu(value: Any) -> None:
    """Move ``value`` to the GPU in place."""
    import torch

    if isinstance(value, torch.nn.Module):
        value.cuda()
    elif isinstance(value, torch.optim.Optimizer):
        value.load_state_dict(value.state_dict())  # its state goes to the device of its parameters
    elif isinstance(value, torch.Tensor):
        value.data = value.data.cuda()
    else:
        for one in value.values() if isinstance(value, dict) else value:
            _to_gpu(one)


def _arguments(marker: pytest.Mark) -> tuple[int, bool]:
    """Return the checked arguments of the marker."""
    given = dict(zip(_ARGUMENTS, marker.args, strict=False)) | dict(marker.kwargs)
    if len(given) != len(marker.args) + len(marker.kwargs) or not set(given) <= set(_ARGUMENTS):
        _refuse(f"@pytest.mark.syncs takes max and fake: {marker.args}, {marker.kwargs}")
    most, fake = given.get("max", 0), given.get("fake", False)
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        _refuse(f'@pytest.mark.syncs: "max" must be an int >= 0: {most!r}')
    if not isinstance(fake, bool):
        _refuse(f'@pytest.mark.syncs: "fake" must be True or False: {fake!r}')
    return most, fake
