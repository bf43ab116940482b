"""A detector that starts before the program uses CUDA does not initialize CUDA itself."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch

from instrument.base.errors import SyncError
from instrument.start import pytest_plugin
from instrument.syncs import coverage
from instrument.syncs.live import detect_syncs, no_syncs
from tests.support.gpu_waits import Driver, Gpu, driver, gpu, here, shown

__all__ = ["driver", "gpu"]

pytestmark = pytest.mark.native


def compute() -> None:
    """Use the CPU alone, without an optimizer, which queries the GPU itself."""
    model = torch.nn.Linear(4, 1)
    model(torch.ones(2, 4, dtype=torch.float64).to(torch.float32, non_blocking=True)).sum().item()


def test_driver_is_not_called(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    """A program that uses the CPU alone never initializes CUDA, and the report says that nothing was checked."""
    with detect_syncs(every=2) as syncs, no_syncs():
        for _ in range(5):
            compute()
            syncs.step()
        running = syncs.report.coverage
    assert ([], []) == (driver.calls, torch.cuda._queued_calls)
    (sentence,) = syncs.report.coverage
    assert [sentence] == running
    assert sentence.startswith("The program never initialized CUDA")
    assert "instrument.dry_run" in sentence
    assert 1 == caplog.text.count("the program never initialized CUDA")
    torch.cuda.init()
    assert [sentence] == syncs.report.coverage  # after the program has used CUDA
    with pytest.raises(AssertionError, match="nothing could be checked: the program never initialized CUDA"):
        syncs.report.assert_max(0)


def test_synchronizations_from_the_first_use_on(driver: Driver, gpu: Gpu) -> None:
    """Each synchronization after CUDA's first use is found with its line and time; torch's mode is restored."""
    with detect_syncs() as syncs:
        compute()
        torch.cuda.init()
        line = here()
        gpu.x.item()
        gpu.x.cpu()
    assert ["_cuda_init"] == driver.calls
    assert [("item", line + 1, 1), ("cpu", line + 2, 1)] == shown(syncs.findings)
    assert [1, 1] == [found.timed for found in syncs.findings]
    assert (0, []) == (gpu.mode, torch.cuda._queued_calls)
    assert not any("initialized" in sentence for sentence in syncs.report.coverage)


@pytest.mark.parametrize("how", ["error", "no_syncs"])
def test_first_synchronization_raises(driver: Driver, gpu: Gpu, how: str) -> None:
    """The first synchronization raises at level "error" and inside `no_syncs`."""
    with detect_syncs("error") if how == "error" else no_syncs():
        torch.cuda.init()
        line = here() + 2
        with pytest.raises(SyncError, match=f"test_before_cuda.py:{line}: "):
            gpu.x.item()
    assert (0, []) == (gpu.mode, torch.cuda._queued_calls)


def test_prototype_warning_is_hidden(driver: Driver, gpu: Gpu, monkeypatch: Any) -> None:
    """Torch's warning that its synchronization mode is a prototype is not shown."""
    set_mode = torch._C._cuda_set_sync_debug_mode

    def warns(mode: int) -> None:
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=1
        )
        set_mode(mode)

    monkeypatch.setattr(torch._C, "_cuda_set_sync_debug_mode", warns)
    with detect_syncs() as syncs:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.simplefilter("error")
            torch.cuda.init()
        gpu.x.item()
    assert [1] == [found.timed for found in syncs.findings]


def test_detector_that_ended_before_initialization(driver: Driver, gpu: Gpu) -> None:
    """A detector that ended before CUDA initializes has no effect on it."""
    with detect_syncs():
        pass
    torch.cuda.init()
    assert 0 == gpu.mode


def test_detector_ends_during_initialization_on_another_thread(driver: Driver, gpu: Gpu) -> None:
    """Neither thread waits for the other, torch runs all its queued calls, and the mode is not left on."""
    inside, ended, ran = threading.Event(), threading.Event(), []
    torch.cuda._lazy_call(lambda: inside.set() or ended.wait(30))
    detector = detect_syncs()
    detector.start()
    torch.cuda._lazy_call(lambda: ran.append(1))
    thread = threading.Thread(target=torch.cuda.init)
    thread.start()
    assert inside.wait(30)
    detector.stop()
    ended.set()
    thread.join()
    assert ([1], 0) == (ran, gpu.mode)


def test_detector_starts_during_initialization_on_another_thread(driver: Driver, gpu: Gpu) -> None:
    """The detector starts without waiting for the initialization, and finds the first synchronization after it."""
    inside, started, started_first = threading.Event(), threading.Event(), []

    def slow() -> None:
        inside.set()
        started_first.append(started.wait(10))

    torch.cuda._lazy_call(slow)
    thread = threading.Thread(target=torch.cuda.init)
    thread.start()
    assert inside.wait(30)
    with detect_syncs() as syncs:
        started.set()
        thread.join()
        gpu.x.item()
    assert [True] == started_first
    assert [1] == [found.timed for found in syncs.findings]
    assert 0 == gpu.mode


def test_detector_starts_as_initialization_ends(driver: Driver, gpu: Gpu) -> None:
    """A detector that starts after torch ran its queued calls times all synchronizations but the first."""
    with torch.cuda._initialization_lock:
        detector = detect_syncs()
        detector.start()
        torch.cuda._initialized = True
    gpu.x.item()
    gpu.x.item()
    detector.stop()
    assert [0, 1] == [found.timed for found in sorted(detector.findings, key=lambda found: str(found.site))]
    assert (0, []) == (gpu.mode, torch.cuda._queued_calls)


def test_detector_ends_while_another_thread_holds_the_lock(driver: Driver, gpu: Gpu) -> None:
    """The call left in torch's queue does nothing, keeps nothing alive, and is removed by the next detector."""
    detector = detect_syncs()
    detector.start()
    live = weakref.ref(detector)
    with torch.cuda._initialization_lock:
        detector.stop()
    del detector
    gc.collect()
    assert live() is None
    with torch.cuda._initialization_lock, detect_syncs():
        assert 2 == len(torch.cuda._queued_calls)
    torch.cuda.init()
    assert 0 == gpu.mode
    with detect_syncs():
        pass
    assert (0, []) == (gpu.mode, torch.cuda._queued_calls)


def test_queued_calls_of_the_program_stay(driver: Driver, gpu: Gpu) -> None:
    """Calls that the program queues run in order, however many detectors start and stop."""
    ran: list[int] = []
    for number in range(4):
        torch.cuda._lazy_call(functools.partial(ran.append, number))
        with detect_syncs():
            torch.cuda._lazy_call(functools.partial(ran.append, number + 10))
    torch.cuda.init()
    assert [0, 10, 1, 11, 2, 12, 3, 13] == ran


def test_internal_errors_do_not_break_initialization(
    driver: Driver, gpu: Gpu, lenient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA initializes although the detector's own call fails."""

    def fail(_: object) -> None:
        raise ZeroDivisionError

    with detect_syncs():
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, "_cuda_set_sync_debug_mode", fail)
            torch.cuda.init()
        assert torch.cuda.is_initialized()


def test_torch_without_queued_calls(driver: Driver, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first synchronization is counted without a time; later ones are timed."""
    detector = detect_syncs()
    with monkeypatch.context() as patch:
        patch.delattr(torch.cuda, "_queued_calls")
        detector.start()
    torch.cuda.init()
    line = here()
    gpu.x.item()
    gpu.x.item()
    detector.stop()
    assert ["_cuda_init"] == driver.calls
    assert [("item", line + 1, 1), ("item", line + 2, 1)] == shown(detector.findings)
    assert [0, 1] == [found.timed for found in sorted(detector.findings, key=lambda found: str(found.site))]
    assert 0 == gpu.mode


def test_is_pinned_is_not_called_before_initialization(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_pinned`, which creates a context on the current device, is not called before CUDA initializes."""
    calls: list[str] = []

    def is_pinned(_: torch.Tensor) -> bool:
        calls.extend(driver.calls or ["before"])
        return False

    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    with detect_syncs():
        for _ in range(2):
            with pytest.raises((RuntimeError, AssertionError)):  # no device to copy to
                torch.ones(20_000).to("cuda:99", non_blocking=True)
            torch.cuda.init()
    assert ["_cuda_init"] == calls


def test_detector_ends_in_a_forked_child(driver: Driver, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forked child, which cannot use CUDA, stopping the detector does not query the mode."""
    torch.cuda.init()
    detector = detect_syncs()
    detector.start()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        detector.stop()
    torch.cuda.set_sync_debug_mode(0)


def test_plugin_only_counts_devices(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pytest plugin only counts devices; a test that does not use the GPU has an empty live report."""
    report = pytest_plugin.Syncs()(compute)
    assert ["device_count"] == driver.calls
    assert ("live", "") == (report.source, report.unavailable_reason)
    report.assert_max(0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        assert "dry run" == pytest_plugin.Syncs()(compute).source


def test_build_without_cuda(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without CUDA or ROCm is reported as such without a call of the driver."""
    assert None is coverage.reason_unavailable()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert None is coverage.reason_unavailable()
    assert [] == driver.calls
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert coverage.NO_GPU == coverage.reason_unavailable()
