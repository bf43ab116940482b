"""Megatron's own ranges as regions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instrument.integrations.megatron import attach
from instrument.record.regions import dispatch, region

pytest.importorskip("megatron.core")
from tests.integrations.megatron_support import PATH

pytestmark = pytest.mark.framework


class Recorder:
    """An emitter that nests ranges like NVTX: a pop closes the last range."""

    name = "recorder"

    def __init__(self) -> None:
        self.open: list[str] = []
        self.trace: list[str] = []

    def push(self, shown: region.Region) -> str:
        self.trace.append("  " * len(self.open) + shown.name)
        self.open.append(shown.name)
        return shown.name

    def pop(self, name: str) -> None:
        assert self.open.pop() == name

    start, end, mark = push, pop, push


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    dispatch.active.add(recorder)
    yield recorder
    dispatch.active.remove(recorder)


Program = list[Any]
NAMES = st.sampled_from("ab")
PROGRAMS = st.recursive(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "push suffix", "pop suffix"]), NAMES), max_size=4),
    lambda inner: st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["push", "pop", "push suffix", "pop suffix"]), NAMES),
            st.tuples(st.sampled_from(["call", "call that raises"]), inner),
        ),
        max_size=5,
    ),
    max_leaves=12,
)


def test_random_calls_are_balanced() -> None:
    """Ranges nest and end with the enclosing range, despite missing or wrong pops and exceptions."""
    from megatron.core import utils

    around = region.make("around", None, None, None, None)

    def execute(program: Program, recorder: Recorder) -> None:
        for action, what in program:
            if action.startswith("call"):
                with contextlib.suppress(KeyError):
                    execute(what, recorder)
                    if "raises" in action:
                        raise KeyError
            else:
                function = utils.nvtx_range_push if action.startswith("push") else utils.nvtx_range_pop
                before = list(recorder.open)
                function(**{"suffix" if "suffix" in action else "msg": what})
                if action.startswith("pop"):  # only the range and those inside it are closed
                    assert before[: len(recorder.open)] == recorder.open
                else:
                    assert recorder.open[-1].endswith(what)

    with attach(at=1000) as attached:

        @given(program=PROGRAMS)
        def check(program: Program) -> None:
            recorder = Recorder()
            dispatch.active.add(recorder)
            try:
                with attached.ranges.around(around, sys._getframe()):
                    execute(program, recorder)
                    assert recorder.open[0] == "around"
                assert recorder.open == []
            finally:
                dispatch.active.remove(recorder)

        check()


def test_early_return(recorder: Recorder) -> None:
    """A range that a function leaves open ends with the function, at the latest at the next range."""
    from megatron.core.utils import nvtx_range_pop, nvtx_range_push

    def early() -> None:
        nvtx_range_push(suffix="mlp")

    def proper() -> None:
        nvtx_range_push(suffix="bda")
        nvtx_range_push("message")
        nvtx_range_pop("message")
        nvtx_range_pop(suffix="bda")

    with attach(at=1000) as attached:
        nvtx_range_push, nvtx_range_pop = (
            vars(sys.modules["megatron.core.utils"])[name] for name in ("nvtx_range_push", "nvtx_range_pop")
        )
        for _ in range(2):
            early()
            proper()
        assert len(attached.ranges) == 0
    module = __name__
    assert recorder.trace == 2 * [f"{module}.early.mlp", f"{module}.proper.bda", "  message"]


def test_imported_by_name(recorder: Recorder) -> None:
    """Modules that imported the functions by name, before or after, call the replacements while attached."""
    from megatron.core import utils
    from megatron.core.transformer import mlp

    original = mlp.nvtx_range_push
    module = ModuleType("late")
    with attach(at=1000):
        assert mlp.nvtx_range_push is utils.nvtx_range_push is not original
        sys.modules["late"] = module
        exec("from megatron.core.utils import nvtx_range_push", vars(module))
        assert vars(module)["nvtx_range_push"] is not original
    assert mlp.nvtx_range_push is utils.nvtx_range_push is vars(module)["nvtx_range_push"] is original
    del sys.modules["late"]


def test_nvtx_profiling_of_megatron(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Megatron's NVTX profiling on, ranges show once: torch.cuda.nvtx is not called."""
    from megatron.core import utils

    called: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", called.append)
    utils.configure_nvtx_profiling(True)
    try:
        with attach(at=1000):
            utils.nvtx_range_push("range")
            utils.nvtx_range_pop("another")  # Megatron's own function raises ValueError
            utils.nvtx_range_pop("range")
            utils.nvtx_range_pop("range")  # and RuntimeError
    finally:
        utils.configure_nvtx_profiling(False)
    assert (called, recorder.trace, recorder.open) == ([], ["range"], [])


def test_decorated_functions(recorder: Recorder) -> None:
    """Functions decorated before or after `attach` are regions, with their messages, until `detach`."""
    from megatron.core import utils
    from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

    apply = lambda: SwiGLUFunction.apply(torch.ones(2, 4), False, False)  # noqa: E731
    before = vars(SwiGLUFunction)["forward"]
    with attach(at=1000):

        @utils.nvtx_decorator(message="late", color="no such color")
        def late() -> None:
            pass

        late()
        apply()
    late()
    apply()
    assert recorder.trace == ["late", f"{PATH}fusions.fused_bias_swiglu.forward"]
    assert vars(SwiGLUFunction)["forward"] is before
