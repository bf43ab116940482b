"""A detector that starts before the program uses CUDA: it waits for that, and asks nothing of the driver."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch

from instrument import pytest_plugin
from instrument.errors import SyncError
from instrument.syncs import coverage
from instrument.syncs.live import detect_syncs, no_syncs
from tests.support.gpu_waits import Driver, Gpu, driver, gpu, here, shown

__all__ = ["driver", "gpu"]

pytestmark = pytest.mark.native


def compute() -> None:
    """Use the CPU; no optimizer, which asks for a GPU itself."""
    model = torch.nn.Linear(4, 1)
    model(torch.ones(2, 4, dtype=torch.float64).to(torch.float32, non_blocking=True)).sum().item()


def test_nothing_is_asked_of_the_driver(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    """A program that uses the CPU alone never initializes CUDA, and the report says that nothing was seen."""
    with detect_syncs(every=2) as syncs, no_syncs():
        for _ in range(5):
            compute()
            syncs.step()
        running = syncs.report.coverage
    assert ([], []) == (driver.calls, torch.cuda._queued_calls)
    (said,) = syncs.report.coverage
    assert [said] == running
    assert said.startswith("The program never initialized CUDA")
    assert "instrument.dry_run" in said
    assert 1 == caplog.text.count("the program never initialized CUDA")
    torch.cuda.init()
    assert [said] == syncs.report.coverage  # of what was looked at
    with pytest.raises(AssertionError, match="nothing could be checked: the program never initialized CUDA"):
        syncs.report.assert_max(0)


def test_waits_are_found_from_the_first_use_on(driver: Driver, gpu: Gpu) -> None:
    """Each is at its line with a time, also the first; the mode of torch is as before at the end."""
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
def test_the_first_wait_raises(driver: Driver, gpu: Gpu, how: str) -> None:
    """At level "error", and inside `no_syncs`, as if CUDA had been used before."""
    with detect_syncs("error") if how == "error" else no_syncs():
        torch.cuda.init()
        line = here() + 2
        with pytest.raises(SyncError, match=f"test_before_cuda.py:{line}: "):
            gpu.x.item()
    assert (0, []) == (gpu.mode, torch.cuda._queued_calls)


def test_what_torch_says_of_the_mode_is_not_shown(driver: Driver, gpu: Gpu, monkeypatch: Any) -> None:
    """Its warning that the mode is a prototype comes from inside of whatever uses CUDA first."""
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


def test_a_detector_that_ended_before_leaves_nothing(driver: Driver, gpu: Gpu) -> None:
    """CUDA initializes as without it."""
    with detect_syncs():
        pass
    torch.cuda.init()
    assert 0 == gpu.mode


def test_a_detector_that_ends_while_another_thread_initializes(driver: Driver, gpu: Gpu) -> None:
    """Neither waits for the other, torch goes through its whole list, and the mode is not left on."""
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


def test_a_detector_that_starts_while_another_thread_initializes(driver: Driver, gpu: Gpu) -> None:
    """It does not wait for that, and finds the first wait after it."""
    inside, started, waited = threading.Event(), threading.Event(), []

    def slow() -> None:
        inside.set()
        waited.append(started.wait(10))

    torch.cuda._lazy_call(slow)
    thread = threading.Thread(target=torch.cuda.init)
    thread.start()
    assert inside.wait(30)
    with detect_syncs() as syncs:
        started.set()
        thread.join()
        gpu.x.item()
    assert [True] == waited
    assert [1] == [found.timed for found in syncs.findings]
    assert 0 == gpu.mode


def test_a_detector_that_starts_as_another_thread_has_initialized(driver: Driver, gpu: Gpu) -> None:
    """Torch has gone through its list, and is not yet done: all but the first wait is timed."""
    with torch.cuda._initialization_lock:
        detector = detect_syncs()
        detector.start()
        torch.cuda._initialized = True
    gpu.x.item()
    gpu.x.item()
    detector.stop()
    assert [0, 1] == [found.timed for found in sorted(detector.findings, key=lambda found: str(found.site))]
    assert (0, []) == (gpu.mode, torch.cuda._queued_calls)


def test_a_detector_that_ends_while_another_thread_has_the_lock(driver: Driver, gpu: Gpu) -> None:
    """What it leaves in torch's list does nothing, keeps nothing alive, and goes with the next detector."""
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


def test_what_others_queue_stays(driver: Driver, gpu: Gpu) -> None:
    """Calls of the program in torch's list are called in their order, whenever detectors come and go."""
    ran: list[int] = []
    for number in range(4):
        torch.cuda._lazy_call(functools.partial(ran.append, number))
        with detect_syncs():
            torch.cuda._lazy_call(functools.partial(ran.append, number + 10))
    torch.cuda.init()
    assert [0, 10, 1, 11, 2, 12, 3, 13] == ran


def test_errors_of_ours_do_not_reach_what_initializes(
    driver: Driver, gpu: Gpu, lenient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA is initialized all the same."""

    def fail(_: object) -> None:
        raise ZeroDivisionError

    with detect_syncs():
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, "_cuda_set_sync_debug_mode", fail)
            torch.cuda.init()
        assert torch.cuda.is_initialized()


def test_a_torch_without_the_list(driver: Driver, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wait is counted without a time, the others have one."""
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


def test_memory_is_not_asked_whether_it_is_pinned_before(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """That makes a context on the current device, which need not be the one that the copy goes to."""
    asked: list[str] = []

    def is_pinned(_: torch.Tensor) -> bool:
        asked.extend(driver.calls or ["before"])
        return False

    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    with detect_syncs():
        for _ in range(2):
            with pytest.raises((RuntimeError, AssertionError)):  # there is none to copy to
                torch.ones(3).to("cuda:99", non_blocking=True)
            torch.cuda.init()
    assert ["_cuda_init"] == asked


def test_a_child_that_was_forked_ends_its_detector(
    driver: Driver, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot use CUDA any more, so it is not asked for the mode."""
    torch.cuda.init()
    detector = detect_syncs()
    detector.start()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        detector.stop()
    torch.cuda.set_sync_debug_mode(0)


def test_the_plugin_does_not_ask_the_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts devices, which torch does by NVML; a test that does not use the GPU then waits for nothing."""
    report = pytest_plugin.Syncs()(compute)
    assert ["device_count"] == driver.calls
    assert ("live", "") == (report.source, report.unavailable_reason)
    report.assert_max(0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        assert "dry run" == pytest_plugin.Syncs()(compute).source


def test_a_build_without_cuda_is_known_at_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for ROCm waits as one for CUDA does."""
    assert None is coverage.missing()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert None is coverage.missing()
    assert [] == driver.calls
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert coverage.NO_GPU == coverage.missing()
