"""`annotate_step`: the parts of a step in every profiler, and when they are patched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset, IterableDataset

import instrument
from instrument.base.patch import Patch, apply, undo
from instrument.record.modules.parts import Switch, contexts
from instrument.record.regions import dispatch, region
from tests.conftest import Events
from tests.modules.conftest import AttachEmitter
from tests.modules.step_parts import Job, patched
from tests.support import native, nsys, warm

DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


pytestmark = pytest.mark.usefixtures("no_patch_left")


def step(optimizer: str = "AdamW", data: str = DATA) -> list[list[str]]:
    """Return the regions of a step of a job."""
    optimizing = f"Optimizer.zero_grad#{optimizer}.zero_grad", f"Optimizer.step#{optimizer}.step"
    names = (data, optimizing[0], "backward", "clip_grad_norm_", optimizing[1], "copy to meta")
    return [[name] for name in names]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_every_part(attach_emitter: AttachEmitter, kind: type[torch.optim.Optimizer], workers: int) -> None:
    """All parts of a real step are regions, side by side; the last ``__next__`` ends the epoch."""
    job = Job(kind, workers)
    data = DATA.replace("_Single", "_Multi").replace("ProcessData", "ProcessingData") if workers else DATA
    with attach_emitter() as emitter, instrument.annotate_step():
        job.train()
    assert [*step(kind.__name__, data) * 2, [data]] == emitter.tree()


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("optimizer", ["Optimizer.zero_grad#AdamW.zero_grad", "Optimizer.step#AdamW.step"]),
        ("data", [DATA]),
        ("backward", ["backward"]),
        ("copies", ["copy to meta"]),
        ("clipping", ["clip_grad_norm_"]),
        ("collectives", []),
    ],
)
def test_selected_parts(attach_emitter: AttachEmitter, part: str, names: list[str]) -> None:
    """Only the selected part is a region."""
    with attach_emitter() as emitter, instrument.annotate_step(part):
        Job().train()
    assert set(names) == {region.name for region in emitter.regions}


def test_each_part_once_in_a_trace(recorded: Callable[..., Events]) -> None:
    """torch.profiler shows each part once, including the parts that it names itself."""
    job = Job()
    alone = Counter(event["name"] for event in recorded(job.train))
    with instrument.annotate_step():
        names = Counter(event["name"] for event in recorded(job.train))
    assert alone | {"backward": 2, "clip_grad_norm_": 2, "copy to meta": 2} == names
    assert names[DATA] == 3
    assert names["Optimizer.step#AdamW.step"] == 2


def test_torch_and_another_emitter(attach_emitter: AttachEmitter, recorded: Callable[..., Events]) -> None:
    """With torch's profiler and another emitter, both show each part once."""
    with attach_emitter() as emitter, instrument.annotate_step():
        events = recorded(Job().train)
    names = Counter(region.name for region in emitter.regions)
    assert names == Counter(name for (name,) in [*step() * 2, [DATA]])
    assert names == Counter(event["name"] for event in events)


@pytest.mark.parametrize(
    ("name", "target", "shown"), [("nvtx", "NVTX", 0), ("nvtx", "KINETO", 2), ("itt", "NVTX", 2)]
)
def test_ranges_that_torch_emits(
    attach_emitter: AttachEmitter, monkeypatch: pytest.MonkeyPatch, name: str, target: str, shown: int
) -> None:
    """Under emit_nvtx and emit_itt torch emits its own ranges; only other tools receive them from the library."""
    optimizer = Job().optimizer
    with attach_emitter() as emitter, instrument.annotate_step("optimizer"):
        monkeypatch.setattr(type(emitter), "name", name)
        with profile(activities=[ProfilerActivity.CPU]):
            monkeypatch.setattr(dispatch.active, "_target", target)
            optimizer.zero_grad()
            optimizer.step()
        assert shown == len(emitter.regions)
        optimizer.step()
    assert shown + 1 == len(emitter.regions)


@pytest.mark.gpu
@pytest.mark.native
def test_emit_nvtx_shows_no_part_twice() -> None:
    """emit_nvtx shows the optimizer's step itself, and no second range of that name appears."""
    events = native.nvtx_log("""
        import torch, instrument
        weight = torch.ones(1, requires_grad=True, device="cuda")
        optimizer = torch.optim.SGD([weight])
        with instrument.annotate_step(), torch.autograd.profiler.emit_nvtx():
            optimizer.step()
            torch.ones(3).to("cuda")
    """)
    names = [str(r.name).split(",")[0] for r in native.ranges(events)]
    assert (names.count("Optimizer.step#SGD.step"), names.count("copy to cuda:0")) == (1, 1)


PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import instrument
from tests.modules.step_parts import Job
with instrument.annotate_step():
    Job().train()
"""


@pytest.mark.native
def test_nvtx() -> None:
    """NVTX has a range for each part, with the bytes of a copy as payload."""
    found = native.ranges(native.nvtx_log(PROGRAM, start=warm.run))
    assert [name for (name,) in [*step() * 2, [DATA]]] == [r.name for r in found]
    assert {"copy to meta": 2 * 4 * 4} == {r.name: r.payload for r in found if r.payload is not None}
    assert {("push_pop", "instrument", 0)} == {(r.kind, r.domain, r.depth) for r in found}


@pytest.mark.nsys
def test_nsight_systems(tmp_path: Path) -> None:
    """A report of the real Nsight Systems has the parts."""
    found = nsys.ranges(nsys.profile(PROGRAM, tmp_path=tmp_path).file)
    assert [name for (name,) in [*step() * 2, [DATA]]] == [r.name for r in found]


def test_numbers_are_unchanged(attach_emitter: AttachEmitter) -> None:
    """Losses and parameters are bit-identical."""
    plain, job = Job(), Job()
    plain.train()
    with instrument.annotate_step(), attach_emitter():
        job.train()
    assert plain.state() == job.state()


def test_no_patches_between_recordings(attach_emitter: AttachEmitter) -> None:
    """Functions are patched only while a profiler or a tool is active."""
    handle = instrument.annotate_step()
    for _ in range(2):
        assert not patched()
        with profile(activities=[ProfilerActivity.CPU]):
            assert {"Tensor.to", "ProcessGroup.allreduce", "no_grad.__enter__"} < patched()
        assert not patched()
    with attach_emitter():
        assert patched()
        handle.remove()
        assert not patched()
        handle.remove()
    with attach_emitter():
        assert not patched()


def test_two_handles(attach_emitter: AttachEmitter) -> None:
    """A part of two handles is patched once, until both are removed."""
    optimizer = Job().optimizer
    with attach_emitter() as emitter:
        first, second = (
            instrument.annotate_step("optimizer", "data"),
            instrument.annotate_step("optimizer", "copies"),
        )
        optimizer.step()
        assert len(emitter.regions) == 1
        first.remove()
        optimizer.step()
        assert len(emitter.regions) == 2
        second.remove()
        optimizer.step()
    assert len(emitter.regions) == 2


def test_patches_of_others_stay(attach_emitter: AttachEmitter) -> None:
    """Another tool's patch stays; a stale call through it shows no region, and the next window shows one."""
    handle = instrument.annotate_step("copies")
    with attach_emitter():
        patched_to = torch.Tensor.to
        torch.Tensor.to = lambda *args: patched_to(*args)  # type: ignore[method-assign]
    try:
        with attach_emitter() as emitter:
            torch.ones(1).to("meta")
            assert emitter.tree() == [["copy to meta"]]
            handle.remove()
            torch.ones(1).to("meta")
            assert emitter.tree() == [["copy to meta"]]
    finally:
        del torch.Tensor.to


def test_handle_removed_inside_a_region(attach_emitter: AttachEmitter) -> None:
    """A region that is open when its handle is removed is closed."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    with attach_emitter() as emitter:
        handle = instrument.annotate_step("optimizer")
        optimizer.step(closure=handle.remove)
    assert emitter.tree() == [["Optimizer.step#SGD.step"]]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failing_closure(attach_emitter: AttachEmitter, error: type[BaseException]) -> None:
    """A failing step closes its region, also for an optimizer wrapped by a scheduler."""

    def fail() -> float:
        raise error

    job = Job()
    with attach_emitter() as emitter, instrument.annotate_step(), pytest.raises(error):
        job.optimizer.step(fail)
    assert emitter.tree() == [["Optimizer.step#AdamW.step"]]


@pytest.mark.parametrize("where", ["enter", "exit"])
def test_interrupted_context_manager(attach_emitter: AttachEmitter, where: str) -> None:
    """A region is closed if its context manager is interrupted; a stale patch shows nothing."""

    class Context:
        def __enter__(self) -> None:
            if where == "enter":
                raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            raise KeyboardInterrupt

    shown, switch = region.make("context", None, None, None, None), Switch()
    with attach_emitter() as emitter:
        patches: list[Patch] = []
        apply(contexts(Context, lambda _: dispatch.enter(shown), switch), patches)
        for switch.on in (True, False):
            with pytest.raises(KeyboardInterrupt), Context():
                pass
        assert emitter.tree() == [["context"]]
    undo(patches)


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise KeyboardInterrupt


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from (1, 2)


def test_end_of_data_and_errors(attach_emitter: AttachEmitter) -> None:
    """The end of the data and errors in it propagate, and close the region."""
    with attach_emitter() as emitter, instrument.annotate_step("data"):
        batches = iter(DataLoader(Numbers(), batch_size=None))
        assert [1, 2] == [next(batches), next(batches)]
        with pytest.raises(StopIteration):
            next(batches)
        with pytest.raises(KeyboardInterrupt):
            next(iter(DataLoader(Failing())))
    assert emitter.tree() == [[DATA]] * 4
