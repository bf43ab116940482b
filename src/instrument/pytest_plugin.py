"""pytest: a test fails where its code makes the CPU wait for the GPU; on a machine without one, in a dry run.

    @pytest.mark.syncs(max=0, fake=False)   # the body of the test, but for what `instrument.allow_sync` allows
    def test_step(): ...

    def test_step(syncs):                   # a part of it
        report = syncs(step)
        report.assert_max(1)

torch is imported where a test uses one of the two.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from .syncs.report import SyncReport

_MARKER = (
    "syncs(max=0, fake=False): fail if the test makes the CPU wait for the GPU more than `max` times in a step"
)
_ARGUMENTS = ("max", "fake")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def syncs() -> Syncs:
    """Run a function and return where it makes the CPU wait for the GPU."""
    return Syncs()


class Syncs:
    """What the fixture ``syncs`` is."""

    def __call__(
        self, step: Callable[[], object], *, fake: bool = False, on_gpu: Iterable[Any] = ()
    ) -> SyncReport:
        """Call ``step`` and return the report: live where there is a GPU, of a dry run elsewhere.

        Args:
            step: takes no arguments. What it raises is raised here.
            fake: in a dry run, compute shapes only.
            on_gpu: modules, optimizers and tensors that are to be on the GPU before, modules first.
        """
        __tracebackhide__ = True
        body = _Body(step)
        report = _looked_at(body, fake, on_gpu)
        body.reraise()
        return report

    @staticmethod
    def allow(reason: str) -> AbstractContextManager[None]:
        """Allow what waits in this block, as `instrument.allow_sync`."""
        from .syncs.policy import allow_sync

        return allow_sync(reason)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # "wrapper" is not known before pytest 8
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Look at what a marked test does while it runs."""
    __tracebackhide__ = True
    marker = item.get_closest_marker("syncs")
    if marker is None:
        yield
        return
    most, fake = _arguments(marker)
    if not isinstance(item, pytest.Function) or inspect.iscoroutinefunction(item.obj):
        _refuse(f"the marker syncs is for functions that are no coroutines: {item.nodeid}")
    test = item.obj
    item.obj = functools.wraps(test)(functools.partial(_run, item, test, most, fake))
    try:
        yield
    finally:
        item.obj = test


def _run(item: pytest.Item, test: Callable[..., Any], most: int, fake: bool, *args: Any, **kwargs: Any) -> None:
    """The body of a marked test: its own failure goes first."""
    __tracebackhide__ = True
    body = _Body(functools.partial(test, *args, **kwargs))
    report = _looked_at(body, fake, ())
    if body.error is not None:
        item.add_report_section("call", "syncs", str(report))
        body.reraise()
    _judge(report, most)


def _judge(report: SyncReport, most: int) -> None:
    reason = report.over(most)
    if reason is not None:
        _refuse(f"{reason}\n\n{report}")


def _refuse(message: str) -> NoReturn:
    pytest.fail(message, pytrace=False)


class _Body:
    """A function whose error is kept, with the traceback that begins in it."""

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
        """Raise what the function raised, without the frames of the detector."""
        __tracebackhide__ = True
        if self.error is not None:
            raise self.error.with_traceback(self._traceback and self._traceback.tb_next)


def _looked_at(body: _Body, fake: bool, on_gpu: Iterable[Any]) -> SyncReport:
    __tracebackhide__ = True
    import torch

    if not torch.cuda.device_count():  # asks NVML where it can: is_available initializes the driver
        from .dryrun.run import dry_run

        return dry_run(body, fake=fake, on_gpu=on_gpu)
    from .syncs import coverage
    from .syncs.live import detect_syncs

    for one in on_gpu:
        _to_gpu(one)
    with detect_syncs(level="log", every=1) as found:
        body()
    report = found.report
    if report.unavailable_reason == coverage.UNUSED:  # there is a GPU, which the test did not wait for
        report.unavailable_reason = ""
    return report


def _to_gpu(value: Any) -> None:
    """Move in place what a dry run takes for being on the GPU."""
    import torch

    if isinstance(value, torch.nn.Module):
        value.cuda()
    elif isinstance(value, torch.optim.Optimizer):
        value.load_state_dict(value.state_dict())  # its state goes where its parameters are by now
    elif isinstance(value, torch.Tensor):
        value.data = value.data.cuda()
    else:
        for one in value.values() if isinstance(value, dict) else value:
            _to_gpu(one)


def _arguments(marker: pytest.Mark) -> tuple[int, bool]:
    """The arguments of the marker, checked."""
    given = dict(zip(_ARGUMENTS, marker.args, strict=False)) | dict(marker.kwargs)
    if len(given) != len(marker.args) + len(marker.kwargs) or not set(given) <= set(_ARGUMENTS):
        _refuse(f"@pytest.mark.syncs takes max and fake: {marker.args}, {marker.kwargs}")
    most = given.get("max", 0)
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        _refuse(f'@pytest.mark.syncs: "max" must be an int >= 0: {most!r}')
    fake = given.get("fake", False)
    if not isinstance(fake, bool):
        _refuse(f'@pytest.mark.syncs: "fake" must be True or False: {fake!r}')
    return most, fake
