"""A dry run finds the idioms that synchronize, and not the similar ones that do not, each by itself."""

from __future__ import annotations

import copy
import io
import os
import pickle
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from instrument.base.findings import SyncFinding
from instrument.explain.waits.report import SyncReport
from instrument.syncs.dryrun.run import dry_run
from tests.dryrun import long_idioms, short_idioms, unseen_idioms
from tests.support.torch_versions import copies_numbers, selects_combinations_by_mask

pytestmark = [
    pytest.mark.corpus,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, of the idioms
]
FILE = "/nowhere/idiom.py"
SETS: list[tuple[str, ModuleType]] = [("first", unseen_idioms), ("second", long_idioms)]
ASSIGN_NUMBERS = {"set_one_element", "set_by_integer_indices", "prune", "suppress_one_token"}


def waits_in_this_torch(name: str) -> bool:
    """Return whether an idiom that synchronizes in some versions of torch does so in the one installed."""
    if name in ASSIGN_NUMBERS:
        return copies_numbers
    return name != "combinations" or selects_combinations_by_mask


CASES = [
    pytest.param(idiom.source, waits and waits_in_this_torch(name), id=f"{which}-{name}")
    for which, module in SETS
    for waits, group in ((True, module.SYNCHRONISING), (False, module.CLEAN))
    for name, idiom in group.items()
    if "Muon" not in idiom.source or hasattr(torch.optim, "Muon")
]


# Idioms whose branch or end depends on values; the report of a run without data says where it ended.
BY_VALUE = {"first-gradcheck"}

UNSEEN = {"first-sparse_adam"}  # sparse tensors, which a run without data does not cover


def names() -> dict[str, Any]:
    """Return the names that idioms use: tensors on the GPU, a module with gradients, CPU tensors."""
    t = torch.randn(4, device="cuda")
    m = nn.Linear(4, 2).to("cuda")
    m(t).sum().backward()
    return {
        "torch": torch, "nn": nn, "F": F, "np": np, "copy": copy, "pickle": pickle, "io": io, "t": t, "m": m,
        "x": torch.randn(3, 4, device="cuda"), "i": torch.tensor([0, 1, 2, 1], device="cuda"),
        "b": torch.tensor([True, False, True, True], device="cuda"), "h": torch.randn(4),
        "p": torch.randn(4).pin_memory(), "__name__": "idiom",
    }  # fmt: skip


def run(source: str, fake: bool) -> tuple[SyncReport, list[SyncFinding]]:
    """Return the report of a dry run of ``source``, and its findings in that source."""
    code = compile(source, FILE, "exec")
    report = dry_run(lambda: exec(code, names()), fake=fake)
    return report, [found for found in report.findings if found.site is None or found.site.file == FILE]


def waited(source: str, fake: bool) -> bool:
    """Return whether a dry run finds a synchronization in ``source``."""
    report, here = run(source, fake)
    if report.error is not None:
        raise report.error
    return any(found.covered for found in here)


@pytest.mark.parametrize(("source", "waits"), CASES)
def test_idioms(source: str, waits: bool) -> None:
    """An idiom that synchronizes is found, and a lookalike is not."""
    assert waits == waited(source, fake=False)


SAMPLE = slice(None) if os.environ.get("INSTRUMENT_FUZZ") == "all" else slice(None, None, 6)


@pytest.mark.fuzz
@pytest.mark.parametrize(("source", "waits"), [case for case in CASES if case.id not in BY_VALUE | UNSEEN][SAMPLE])
def test_idioms_without_data(source: str, waits: bool) -> None:
    """The same holds for tensors without data; `make fuzz` runs all idioms, the other targets one in six."""
    assert waits == waited(source, fake=True)


@pytest.mark.parametrize(("source", "waits"), [case for case in CASES if case.id in BY_VALUE])
def test_idioms_that_depend_on_data(source: str, waits: bool) -> None:
    """A run without data that ends early reports its end, and the synchronizations until then."""
    report, here = run(source, fake=True)
    assert report.error is not None
    assert [False] == [found.covered for found in here if not found.covered]
    assert waits == any(found.covered for found in here)


LISTED = [
    pytest.param(source, waits, id=f"{kind}-{name}")
    for kind, waits, group in (("SYNC", True, short_idioms.SYNCHRONISING), ("NOSYNC", False, short_idioms.CLEAN))
    for name, source in group.items()
]


@pytest.mark.parametrize(("source", "waits"), [case for case in CASES if case.id in UNSEEN])
def test_idioms_that_are_not_seen(source: str, waits: bool) -> None:
    """A run without data reports what it does not cover."""
    report, here = run(source, fake=True)
    assert (None, waits) == (report.error, any(not found.covered for found in here))


@pytest.mark.parametrize(("source", "waits"), LISTED)
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_listed_idioms(source: str, waits: bool, fake: bool) -> None:
    """A dry run classifies each one-line idiom correctly, with and without data."""
    assert waits == waited(source, fake)
