"""Helpers that the tests of the Megatron adapter share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from instrument.integrations.megatron import MegatronAdapter
from tests.conftest import annotations
from tests.support.programs import ROOT

pytest.importorskip("megatron.core")


FOLDER = ROOT / "integrations" / "megatron"
SCRIPT = FOLDER / "train.py"
PATH = "megatron.core."


def outline(folder: Path, keep: str, rank: int = 0) -> list[str]:
    """Return the main thread's regions in the first window whose names match, indented by nesting."""
    (file,) = (folder / "window-0001").glob(f"rank{rank}.*.pt.trace.json.gz")
    events = [event for event in annotations(file) if re.fullmatch(keep, event["name"])]
    lines, open_ends = [], []
    for event in events:
        open_ends = [end for end in open_ends if end > event["ts"]]
        lines.append("  " * len(open_ends) + event["name"].replace(PATH, ""))
        open_ends.append(event["ts"] + event["dur"])
    return lines


def recorded_steps(adapter: MegatronAdapter) -> list[Any]:
    return [entry["steps"] for entry in adapter.windows if entry["status"] == "recorded"]


def losses(text: str) -> list[str]:
    return re.findall(r"loss (\S+)", text)
