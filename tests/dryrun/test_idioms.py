"""A dry run finds the idioms that synchronize, and not the similar ones that do not.

One dry run has many idioms, each a file of its own; a few need one by themselves.
"""

from __future__ import annotations

import copy
import functools
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


SOURCES: dict[str, str] = {}
WAITS: dict[str, bool] = {}
for which, module in SETS:
    for waits, group in ((True, module.SYNCHRONISING), (False, module.CLEAN)):
        for name, idiom in group.items():
            if "Muon" not in idiom.source or hasattr(torch.optim, "Muon"):
                SOURCES[f"{which}-{name}"] = idiom.source
                WAITS[f"{which}-{name}"] = waits and waits_in_this_torch(name)
LISTED: dict[str, str] = {}
for kind, lines in (("SYNC", short_idioms.SYNCHRONISING), ("NOSYNC", short_idioms.CLEAN)):
    LISTED |= {f"{kind}-{name}": source for name, source in lines.items()}

# Idioms whose branch or end depends on values; the report of a run without data says where it ended.
BY_VALUE = {"first-gradcheck"}

UNSEEN = {"first-sparse_adam"}  # sparse tensors, which a run without data does not cover
ALONE = {
    "first-gaussian_nll_loss",  # without data, each check of a value by torch is true in turn
    "second-save_in_a_thread",  # its synchronization has no line
}
SAMPLE = slice(None) if os.environ.get("INSTRUMENT_FUZZ") == "all" else slice(None, None, 6)
WITHOUT_DATA = [name for name in SOURCES if name not in BY_VALUE | UNSEEN][SAMPLE]


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
    """Return the report of a dry run of ``source`` alone, and its findings in that source."""
    code = compile(source, FILE, "exec")
    report = dry_run(lambda: exec(code, names()), fake=fake)
    return report, [found for found in report.findings if found.site is None or found.site.file == FILE]


@functools.cache
def waits_of(listed: bool, fake: bool) -> dict[str, bool | Exception]:
    """Return whether a dry run of many idioms finds a synchronization in each, or the error of that idiom."""
    sources = LISTED if listed else {name: SOURCES[name] for name in (WITHOUT_DATA if fake else SOURCES)}
    alone = {name: alone_waits(sources[name], fake) for name in ALONE & {*sources}}
    sources = {name: source for name, source in sources.items() if name not in ALONE}
    errors: dict[str, Exception] = {}

    def step() -> None:
        for name, source in sources.items():
            try:
                exec(compile(source, f"/nowhere/{name}.py", "exec"), names())
            except Exception as error:
                errors[name] = error

    report = dry_run(step, fake=fake)
    assert report.error is None
    assert all(found.site for found in report.findings)
    files = {found.site.file for found in report.findings if found.covered and found.site}
    return {name: errors.get(name, f"/nowhere/{name}.py" in files) for name in sources} | alone


def alone_waits(source: str, fake: bool) -> bool | Exception:
    report, here = run(source, fake)
    return report.error or any(found.covered for found in here)


@pytest.mark.parametrize("name", SOURCES)
def test_idioms(name: str) -> None:
    """An idiom that synchronizes is found, and a lookalike is not."""
    assert WAITS[name] == waits_of(listed=False, fake=False)[name]


@pytest.mark.fuzz
@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_idioms_without_data(name: str) -> None:
    """The same holds for tensors without data; `make fuzz` runs all idioms, the other targets one in six."""
    assert WAITS[name] == waits_of(listed=False, fake=True)[name]


@pytest.mark.parametrize("name", sorted(BY_VALUE))
def test_idioms_that_depend_on_data(name: str) -> None:
    """A run without data that ends early reports its end, and the synchronizations until then."""
    report, here = run(SOURCES[name], fake=True)
    assert report.error is not None
    assert [False] == [found.covered for found in here if not found.covered]
    assert WAITS[name] == any(found.covered for found in here)


@pytest.mark.parametrize("name", sorted(UNSEEN))
def test_idioms_that_are_not_seen(name: str) -> None:
    """A run without data reports what it does not cover."""
    report, here = run(SOURCES[name], fake=True)
    assert (None, WAITS[name]) == (report.error, any(not found.covered for found in here))


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_listed_idioms(name: str, fake: bool) -> None:
    """A dry run classifies each one-line idiom correctly, with and without data."""
    assert name.startswith("SYNC") == waits_of(listed=True, fake=fake)[name]
