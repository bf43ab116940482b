"""The marker ``budget`` and the fixtures ``counts`` and ``region_tree``, in separate pytest runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.inner_pytest import failure, marked_tests, outcomes, run

pytestmark = pytest.mark.process

MARKED = """
import pytest
import torch

pytestmark = pytest.mark.budget(graph_breaks=0, collective_bytes=0)


def product(size=4):
    a = torch.ones(size, size, device="cuda")
    return a @ a


@pytest.mark.budget(syncs=0, kernels=2, flops=128, read_bytes=10_000)
def test_within():
    product()


@pytest.mark.budget(**{"kernels.gemm": 1, "flops.matmul": 127})
def test_too_many_operations():
    product()


@pytest.mark.budget(syncs=1, d2h_bytes=0)
def test_too_many_bytes():
    product().sum().item()


@pytest.mark.budget(kernel=1)
def test_unknown_name():
    product()


@pytest.mark.budget(kernels=-1)
def test_wrong_number():
    product()


@pytest.mark.budget(4)
def test_without_a_name():
    product()


@pytest.mark.budget(kernels=0)
def test_own_failure():
    assert product().shape == (5, 5), "own message"


@pytest.mark.budget(kernels=9)
def test_nothing_on_the_gpu():
    torch.ones(4).sum()


@pytest.mark.budget(flops=1024)
@pytest.mark.parametrize("size", [8, 9])
def test_arguments(size):
    product(size)


@pytest.mark.budget(kernels=0)
class TestOfAClass:
    def test_method(self):
        product()

    @pytest.mark.budget(kernels=2)
    def test_own_limit(self):
        product()


@pytest.mark.syncs(max=0)
@pytest.mark.budget(kernels=0)
def test_both():
    product().sum().item()


@pytest.mark.budget(kernels=9)
async def test_coroutine():
    pass
"""
EXPECTED = {
    "test_within": "PASSED",
    "test_too_many_operations": "FAILED",
    "test_too_many_bytes": "FAILED",
    "test_unknown_name": "FAILED",
    "test_wrong_number": "FAILED",
    "test_without_a_name": "FAILED",
    "test_own_failure": "FAILED",
    "test_nothing_on_the_gpu": "FAILED",
    "test_arguments[8]": "PASSED",
    "test_arguments[9]": "FAILED",
    "test_method": "FAILED",
    "test_own_limit": "PASSED",
    "test_both": "FAILED",
    "test_coroutine": "FAILED",
}


marked = marked_tests(MARKED)


def test_outcomes(marked: tuple[Path, str]) -> None:
    """A test that does more than a limit fails; limits of the test replace those of its class, and add to them."""
    assert outcomes(marked[1]) == EXPECTED, marked[1]


def test_messages(marked: tuple[Path, str]) -> None:
    """The failure names the number, the limit and the largest places; wrong markers are refused."""
    text = marked[1]
    assert "flops.matmul is 128; allowed: 127\n    128 at test_it.py:10: return a @ a" in failure(
        text, "test_too_many_operations"
    )
    assert "d2h_bytes is 4; allowed: 0\n    4 at test_it.py:25" in failure(text, "test_too_many_bytes")
    assert "@pytest.mark.budget: unknown number 'kernel'; known numbers: " in failure(text, "test_unknown_name")
    assert '@pytest.mark.budget: "kernels" must be >= 0: -1' in failure(text, "test_wrong_number")
    assert "it takes limits by name, such as syncs=0: (4,)" in failure(text, "test_without_a_name")
    assert "own message" in failure(text, "test_own_failure")
    assert "nothing could be counted" in failure(text, "test_nothing_on_the_gpu")
    both = failure(text, "test_both")
    assert "the step waits for the GPU once; allowed: 0" in both
    assert "allowed: 0\n    " in both.partition("kernels is ")[2]


def test_workers(marked: tuple[Path, str]) -> None:
    """Workers of pytest-xdist find the same."""
    pytest.importorskip("xdist")
    folder, _ = marked
    code, text = run(folder, "-v", "-p", "xdist", "-n", "1", "-k", "within or operations")
    assert code == 1, text
    found = {name: outcome for outcome, name in re.findall(r"([A-Z]{6}) \S+::(test_\w+)", text)}
    assert found == {"test_within": "PASSED", "test_too_many_operations": "FAILED"}, text


FIXTURES = """
import pytest
import torch

import instrument


def step(again=0):
    with instrument.annotate("step"):
        with instrument.annotate("forward"):
            y = torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")
        for _ in range(again):
            with instrument.annotate("again"):
                y.sum()


def test_counts(counts):
    found = counts(step)
    assert found["flops"] == 128
    found.assert_max(kernels=3, flops=128, syncs=0)
    with pytest.raises(AssertionError, match="flops is 128; allowed: 100"):
        found.assert_max(flops=100)
    with pytest.raises(ValueError, match="unknown number 'flop'"):
        found.assert_max(flop=100)


def test_unused(counts):
    with pytest.raises(pytest.fail.Exception, match="nothing could be counted"):
        counts(lambda: None)


def test_regions(region_tree):
    region_tree(lambda: step(AGAIN), "regions.txt")


def test_error(counts):
    with pytest.raises(ZeroDivisionError):
        counts(lambda: 1 / 0)
"""


def test_fixtures(tmp_path: Path) -> None:
    """`counts` returns the numbers of a step; `region_tree` holds its regions to a file beside the test."""
    (tmp_path / "tests").mkdir()
    test = tmp_path / "tests" / "test_it.py"
    test.write_text(FIXTURES.replace("AGAIN", "0"))
    _, text = run(tmp_path, "-v")
    assert "regions.txt; pytest --update-regions writes it" in text
    assert run(tmp_path, "--update-regions")[0] == 0
    assert (tmp_path / "tests" / "regions.txt").read_text().endswith("\nstep\n  forward\n")
    code, text = run(tmp_path, "-v")
    assert (code, set(outcomes(text).values())) == (0, {"PASSED"}), text
    test.write_text(FIXTURES.replace("AGAIN", "2"))
    code, text = run(tmp_path, "-v")
    assert code == 1
    assert "new: step > again, 2 times" in text
