"""Finds the cycle of a loop whose phases follow each other as outermost regions: each round of it is a step."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from .table import Array, Interner, Table

PART_OF_STEP = re.compile(r"^(?:Optimizer\.|enumerate\(DataLoader\)|nccl:)")
"""The names of torch's own regions, of which a step has several."""
MIN_CALLS = 3  # calls that make a region, or a cycle of regions, a step

_BETWEEN = re.compile(
    r"(?<![a-z])(?:eval\w*|val|valid\w*|test\w*|checkpoint\w*|ckpt|sav(?:e|ing)\w*|log|logging|sampl\w*)(?![a-z])",
    re.IGNORECASE,
)
_UPDATE = re.compile(r"optim|update|(?<![a-z])step|apply_grad", re.IGNORECASE)
_MOST = 64  # regions of a cycle
_REGULAR = 0.9  # of the rounds: a region that fewer of them have comes in between


class Cycle(NamedTuple):
    """The rounds of a cycle.

    Attributes:
        start_ns: when the first region of each round begins.
        end_ns: when the round ends: where the next one, or a region in between, begins.
        first: the first region of each round, a row of the regions.
        names: the regions of a round, in their order.
    """

    start_ns: Array
    end_ns: Array
    first: Array
    names: list[str]


def find_cycle(regions: Table, rows: Array, names: list[str]) -> Cycle | None:
    """Return the cycle of at least two named regions; None if there is none.

    A round ends with the update of the parameters, if a region is named after one; regions before it may repeat,
    as with micro-batches. Otherwise a round begins with the region that is called most often. Evaluations, and
    regions that only some rounds have, come in between.

    Args:
        regions: all regions.
        rows: the outermost regions of one thread, in order of their start.
        names: their names, which may be those of several calls.
    """
    numbers = Interner[str]()
    codes = np.array([numbers[name] for name in names], np.int64)
    known, calls = list(numbers), np.bincount(codes)
    often = np.flatnonzero(calls >= MIN_CALLS).tolist()
    regular = [code for code in often if not _BETWEEN.search(known[code])] if len(often) <= _MOST else []
    updates = [code for code in regular if _UPDATE.search(known[code])]
    last = {code: int(np.flatnonzero(codes == code)[-1]) for code in updates}
    if updates:
        update = min(updates, key=lambda code: (calls[code], -last[code]))
        round_of = np.cumsum(np.concatenate(([0], codes[:-1] == update)))
        if found := _rounds(regions, rows, codes, known, regular, round_of):
            return found
    for code in sorted(regular, key=lambda code: -calls[code]):  # of equally many, the first
        if found := _rounds(regions, rows, codes, known, regular, np.cumsum(codes == code) - 1):
            return found
    return None


def _rounds(
    regions: Table, rows: Array, codes: Array, known: list[str], regular: list[int], round_of: Array
) -> Cycle | None:
    """Return the cycle whose rounds are numbered in ``round_of``; None if they have too little in common."""
    count = int(round_of.max()) + 1
    inside = round_of >= 0
    has = np.array([np.bincount(round_of[inside & (codes == code)], minlength=count) > 0 for code in regular])
    whole = has[:, 1:-1] if count > MIN_CALLS else has  # the recording may begin and end within a round
    common = whole.mean(1) >= _REGULAR
    core = [code for code, each in zip(regular, common.tolist(), strict=True) if each]
    if sum(not PART_OF_STEP.search(known[code]) for code in core) < 2:
        return None
    complete = has[common].all(0)
    complete[1:-1] = True
    ours = np.flatnonzero(np.isin(codes, core) & inside)
    if np.any(regions.end_ns[rows[ours]][:-1] > regions.start_ns[rows[ours]][1:]):
        return None
    of, first = np.unique(round_of[ours], return_index=True)
    last = np.append(first[1:], len(ours)) - 1
    following = np.append(regions.start_ns[rows], np.iinfo(np.int64).max)[ours[last] + 1]
    ends = np.where(ours[last] + 1 < len(rows), following, regions.end_ns[rows[ours[last]]])
    kept = complete[of]
    if kept.sum() < MIN_CALLS:
        return None
    order = dict.fromkeys(codes[ours][round_of[ours] == of[kept][0]].tolist())
    begun = rows[ours[first]][kept]
    return Cycle(regions.start_ns[begun], ends[kept], begun, [known[code] for code in order])
