"""pytest plugin: fails tests whose code makes the CPU wait for the GPU; without a GPU, it uses a dry run.

    @pytest.mark.syncs(max=0, fake=False)   # the body of the test, except inside `instrument.allow_sync`
    def test_step(): ...

    def test_step(syncs):                   # a part of it
        report = syncs(step)
        report.assert_max(1)

torch is imported only for tests that use one of the two.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from ..explain.waits.report import SyncReport

_MARKER = (
    "syncs(max=0, fake=False): fail if the test makes the CPU wait for the GPU more than `max` times in a step"
)
_ARGUMENTS = ("max", "fake")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def syncs() -> Syncs:
    """Return an object that runs a function and reports where the CPU waits for the GPU."""
    return Syncs()


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
        body = _Body(step)
        report = _report_on(body, fake, on_gpu)
        body.reraise()
        return report

    @staticmethod
    def allow(reason: str) -> AbstractContextManager[None]:
        """Allow synchronizations in this block, like `instrument.allow_sync`."""
        from ..syncs.policy import allow_sync

        return allow_sync(reason)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # "wrapper" is not known before pytest 8
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Check the synchronizations of a marked test."""
    __tracebackhide__ = True
    _check_spelling(item)
    marker = item.get_closest_marker("syncs")
    if marker is None:
        yield
        return
    most, fake = _arguments(marker)
    if not isinstance(item, pytest.Function) or inspect.iscoroutinefunction(item.obj):
        _refuse(f"the marker syncs takes plain functions, not coroutines: {item.nodeid}")
    test = item.obj
    item.obj = functools.wraps(test)(functools.partial(_run, item, test, most, fake))
    try:
        yield
    finally:
        item.obj = test


def _check_spelling(item: pytest.Item) -> None:
    """Refuse a marker that nobody registered and that resembles ``syncs``, in its arguments as well."""
    registered = {re.split(r"[(:]", line)[0].strip() for line in item.config.getini("markers")}
    for marker in item.iter_markers():
        near = difflib.get_close_matches(marker.name, ["syncs"], cutoff=0.7)
        ours = set(marker.kwargs) <= set(_ARGUMENTS) and (marker.kwargs or marker.name not in ("sync", "async"))
        if near and ours and marker.name not in registered:
            _refuse(f"there is no marker {marker.name}; did you mean @pytest.mark.syncs?")


def _run(item: pytest.Item, test: Callable[..., Any], most: int, fake: bool, *args: Any, **kwargs: Any) -> None:
    """Run the body of a marked test; its own failure takes precedence."""
    __tracebackhide__ = True
    body = _Body(functools.partial(test, *args, **kwargs))
    report = _report_on(body, fake, ())
    if body.error is not None:
        item.add_report_section("call", "syncs", str(report))
        body.reraise()
    reason = report.over(most)
    if reason is not None:
        _refuse(f"{reason}\n\n{report}")


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


def _report_on(body: _Body, fake: bool, on_gpu: Iterable[Any]) -> SyncReport:
    __tracebackhide__ = True
    import torch

    if not torch.cuda.device_count():  # queries NVML if it can: is_available initializes the driver
        from ..syncs.dryrun.run import dry_run

        return dry_run(body, fake=fake, on_gpu=on_gpu)
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
