"""The choice of emitters, and the removal of failing ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instrument import annotate
from instrument.record.regions import emitters
from instrument.record.regions.emitters import redundant
from instrument.record.regions.torch_emitters import TorchProfilerEmitter
from tests.conftest import annotations
from tests.support import native, warm
from tests.support.programs import environment, program, python
from tests.support.ranges import outline


@pytest.mark.parametrize("emit_roctx, target, names, expected", [
    ("", "KINETO", ["nvtx", "itt", "roctx", "torch"], set()),
    ("", "NVTX", ["nvtx", "torch"], {"torch"}),
    ("", "NVTX", ["roctx", "torch"], {"torch"}),  # ROCm's emit_nvtx calls rocTX
    ("", "NVTX", ["itt", "torch"], set()),
    ("", "NVTX", ["torch"], set()),
    ("", "ITT", ["itt", "torch"], {"torch"}),
    ("", "ITT", ["nvtx", "torch"], set()),
    ("", "NVTX", ["nvtx"], set()),
    ("0", "KINETO", ["roctx", "torch"], set()),
    ("1", "KINETO", ["roctx", "torch"], {"roctx"}),
    ("1", "KINETO", ["roctx"], set()),
])  # fmt: skip
def test_redundant_emitters(
    monkeypatch: pytest.MonkeyPatch, emit_roctx: str, target: str, names: list[str], expected: set[str]
) -> None:
    """If torch forwards its ranges to a tool that also has an emitter, one of the two is redundant."""
    monkeypatch.setenv("TORCH_PROFILER_EMIT_ROCTX", emit_roctx)
    assert expected == redundant(names, target)


@pytest.mark.gpu
@pytest.mark.native
def test_emit_nvtx_shows_no_region_twice() -> None:
    """Torch's emit_nvtx emits ranges of operators; regions are not emitted a second time."""
    events = native.nvtx_log("""
        import torch
        from instrument import annotate

        torch.ones(1, device="cuda")
        with torch.autograd.profiler.emit_nvtx():
            with annotate("work"):
                torch.ones(1, device="cuda")
    """)
    names = [str(r.name).split(",")[0] for r in native.ranges(events)]
    assert (names.count("work"), names.count("aten::ones")) == (1, 1)


@pytest.mark.native
def test_configure_at_run_time(tmp_path: Path) -> None:
    """Regions go to the newly chosen emitters; open ranges are closed by the emitter that opened them."""
    script = """
        import sys
        from torch.profiler import ProfilerActivity, profile
        from instrument import annotate, configure

        def region(name):
            with annotate(name):
                pass

        region("auto before")
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            with annotate("across"):
                configure(emitters=["nvtx"])
                region("nvtx and the profiler that is already on")
        prof.export_chrome_trace(sys.argv[1])
        with profile(activities=[ProfilerActivity.CPU]):
            region("nvtx")
        configure(emitters=())
        region("nobody")
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            configure(emitters="torch")
            region("too late for torch")
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            region("torch")
        prof.export_chrome_trace(sys.argv[2])
        configure(emitters="auto")
        region("auto after")
        try:
            configure(emitters=["nvtx", "vtune"])
        except ValueError as error:
            assert "vtune" in str(error), error
        region("as before")
    """
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    found = native.ranges(native.nvtx_log(script, args=[str(first), str(second)], start=warm.run))
    already = "nvtx and the profiler that is already on"
    assert f"auto before\nacross\n  {already}\nnvtx\nauto after\nas before" == outline(found)
    assert ["across", already] == [event["name"] for event in annotations(first)]
    assert [event["name"] for event in annotations(second)] == ["torch"]


REGION = """
    from instrument import annotate

    with annotate("region"):
        pass
"""


@pytest.mark.native
def test_emitters_from_the_environment() -> None:
    """INSTRUMENT_EMITTERS disables a detected tool and enables one that was not detected."""
    assert native.nvtx_log(REGION, env={"INSTRUMENT_EMITTERS": "torch,itt"}) == []
    assert [e["op"] for e in native.roctx_log(REGION, env={"INSTRUMENT_EMITTERS": "roctx"})] == ["push", "pop"]


@pytest.mark.native
def test_wrong_emitter_in_the_environment(tmp_path: Path) -> None:
    """A wrong INSTRUMENT_EMITTERS logs one warning with the accepted names, and detected tools are used."""
    wrong = {"INSTRUMENT_EMITTERS": "nvtx,vtune"}
    assert outline(native.ranges(native.nvtx_log(REGION, env=wrong))) == "region"
    done = warm.run(python(program(REGION, tmp_path)), environment(wrong), check=True)
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in ("INSTRUMENT_EMITTERS is ignored", "vtune", "torch, nvtx, roctx"))


def test_failing_emitter_is_dropped(
    recorded: Callable[..., list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lenient: None,
) -> None:
    """A failing emitter never affects the function, is logged once, and is tried again in the next recording."""

    @annotate("work")
    def work() -> int:
        with annotate("block"):
            return 42

    def push(self: object, region: object) -> None:
        raise OSError("no room for ranges")

    results: list[int] = []
    with monkeypatch.context() as broken:
        broken.setattr(TorchProfilerEmitter, "push", push)
        assert recorded(lambda: results.extend([work(), work()])) == []
    assert results == [42, 42]
    assert caplog.messages == [
        "instrument: emitter torch failed and was skipped; training continues"
        " (error=OSError('no room for ranges'))"
    ]
    assert [event["name"] for event in recorded(work)] == ["work", "block"]


@pytest.mark.native
def test_other_emitters_continue(tmp_path: Path) -> None:
    """If one of two emitters fails to open or close a range, the other still receives every region."""
    script = """
        import logging, sys
        from torch.profiler import ProfilerActivity, profile
        from instrument import annotate
        from instrument.record.regions.tool_emitters import NvtxEmitter
        from instrument.record.regions.torch_emitters import TorchProfilerEmitter

        messages = []
        logging.getLogger("instrument").addFilter(lambda record: messages.append(record.getMessage()))

        @annotate("work")
        def work(result):
            return result

        def fail(*_):
            raise OSError("broken")

        for path, broken, method in (
            (sys.argv[1], TorchProfilerEmitter, "push"),
            (sys.argv[2], NvtxEmitter, "push"),
        ):
            original = getattr(broken, method)
            with profile(activities=[ProfilerActivity.CPU]) as prof:
                assert 1 == work(1)
                with annotate("across"):
                    setattr(broken, method, fail)
                    assert [2, 3] == [work(2), work(3)]
                    setattr(broken, method, original)
            prof.export_chrome_trace(path)
        assert 2 == len(messages), messages
    """
    torch_broken, nvtx_broken = tmp_path / "torch.json", tmp_path / "nvtx.json"
    found = native.ranges(native.nvtx_log(script, args=[str(torch_broken), str(nvtx_broken)], start=warm.run))
    assert outline(found) == "work\nacross\n  work\n  work\nwork\nacross"
    assert [event["name"] for event in annotations(torch_broken)] == ["work", "across"]
    assert [event["name"] for event in annotations(nvtx_broken)] == ["work", "across", "work", "work"]


def test_an_emitter_that_cannot_be_made_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls skip it, as each try may cost an import; the other emitters are attached."""
    tried: list[str] = []

    def fail() -> Any:
        tried.append("itt")
        raise ImportError("no ittapi on purpose")

    monkeypatch.setattr(emitters, "_FACTORIES", {"itt": fail, "jax": lambda: SimpleNamespace(name="jax")})
    monkeypatch.setattr(emitters, "names_from_settings", lambda: ["itt", "jax"])
    failed: set[str] = set()
    first = emitters.attached([], failed)
    again = emitters.attached(first, failed)
    assert [["jax"], ["jax"]] == [[emitter.name for emitter in found] for found in (first, again)]
    assert first == again
    assert (["itt"], {"itt"}) == (tried, failed)
