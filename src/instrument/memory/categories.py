"""What each allocation of a snapshot is for: from its stack or, where that says nothing, from other evidence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..traces.table import Array, Table
from .casts import weight_casts
from .passes import BACKWARD_PASS, FORWARD_PASS, OPTIMIZER_STEP, Passes
from .stacks import CAST, MODULE, OPTIMIZER, PARAMETERS, WORKSPACE, StackFacts

CATEGORIES = {
    "parameters": "parameters and buffers of modules",
    "gradients": "allocated in the backward pass, and kept after it",
    "optimizer_state": "allocated in a step of an optimizer, and kept after it",
    "activations": "allocated in a module and kept after the forward pass, or freed by the backward pass",
    "casts": "copies of parameters that autocast makes in a lower precision, and keeps for the backward pass",
    "temporaries": "freed in the pass in which it was allocated",
    "workspace": "what libraries such as cuBLAS compute in",
    "other": "allocated outside modules, backward pass and optimizer, and kept: batches, results",
}
"""The categories, which add up to the memory in use. The passes are forward, backward and optimizer."""

_NAMES = list(CATEGORIES)
_PARAMETERS, _GRADIENTS, _STATE, _ACTIVATIONS, _CASTS, _TEMPORARIES, _WORKSPACE, _OTHER = range(len(_NAMES))

_OF_AUTOGRAD = "allocated on a thread that Python did not start, as those of autograd"
EVIDENCE = {
    "known": "",
    "workspace": "a C++ frame is that of a workspace",
    "optimizer": "allocated while torch marks a step of the optimizer",
    "backward temporary": f"{_OF_AUTOGRAD}, and freed in the same backward pass",
    "unfinished": f"{_OF_AUTOGRAD}, in the pass in which the history ends, and no parameter has its size",
    "gradient": f"{_OF_AUTOGRAD}, and kept after the backward pass",
    "sized gradient": f"{_OF_AUTOGRAD}, kept after the backward pass, and of the size of a parameter",
    "older parameter": "older than the history, in use to its end, and of the size of a gradient",
    "older state": "older than the history and in use to its end; its size occurs once for the parameters, and "
    "once more for each state of the optimizer",
    "older": "older than the history and in use to its end: most likely parameters, else state of an optimizer or "
    "what earlier steps left behind",
    "older activation": "older than the history, and freed in a backward pass",
    "older, sized activation": "older than the history, and its size is that of an activation of a later pass",
    "older gradient": "older than the history, freed outside backward passes, and of the size of a gradient",
    "unknown": "",
}
"""What an inferred category rests on, by a short name; what is "known" has a line instead."""
_REASONS = list(EVIDENCE)


def category_words(category: str) -> str:
    """Return what people call a category: "optimizer state"."""
    return category.replace("_", " ")


def page_class(category: str) -> str:
    """Return what pages call a category, which gives its color; on them, "other" is idle time."""
    return "other_memory" if category == "other" else category


def categorize(allocations: Table, events: int, passes: Passes, facts: StackFacts) -> Table:
    """Return what the allocations of a `MemorySnapshot` are for, in rows beside them.

    Args:
        allocations: the allocations.
        events: the number of events.
        passes: the passes of the events.
        facts: what the stacks tell.

    Returns:
        A table with the columns ``category`` (text, of `CATEGORIES`), ``evidence`` (text, of `EVIDENCE`) and
        ``line`` (a row of ``frames``; -1 if there is none).
    """
    category, evidence = (np.zeros(len(allocations), np.int64) for _ in range(2))
    for device in np.unique(allocations.device).tolist():
        rows = np.flatnonzero(allocations.device == device)
        category[rows], evidence[rows] = _of_device(allocations.where(rows), events, passes, facts)
    line = facts.line[allocations.stack]
    evidence[line >= 0] = _reason("known")
    strings = [*_NAMES, *_REASONS]
    return Table({"category": category, "evidence": evidence + len(_NAMES), "line": line}, strings)


def _reason(name: str) -> int:
    return _REASONS.index(name)


def _of_device(own: Table, events: int, passes: Passes, facts: StackFacts) -> tuple[Array, Array]:
    """Return the category of each allocation of a device, and the evidence for it."""
    marks = facts.marks[own.stack]
    begun, ended, same, last = _when(own, events, passes)
    old, kept = own.begin < 0, own.end >= events
    makes = (marks & PARAMETERS > 0) & (marks & MODULE == 0)
    backward = begun == BACKWARD_PASS
    sized = np.isin(own.requested_bytes, own.requested_bytes[(old & kept & (marks & OPTIMIZER == 0)) | makes])
    unfinished = backward & last & ~sized & sized.any()
    rules: list[tuple[Array, int, str]] = [
        (marks & WORKSPACE > 0, _WORKSPACE, "workspace"),
        (old & (marks & OPTIMIZER > 0), _STATE, "known"),
        (old & makes, _PARAMETERS, "known"),
        (old & (marks & MODULE > 0), _ACTIVATIONS, "known"),
        (same & backward, _TEMPORARIES, "backward temporary"),
        (same, _TEMPORARIES, "optimizer"),
        (begun == OPTIMIZER_STEP, _STATE, "optimizer"),
        (unfinished, _TEMPORARIES, "unfinished"),
        (backward & sized, _GRADIENTS, "sized gradient"),
        (backward, _GRADIENTS, "gradient"),
        (~old & makes, _PARAMETERS, "known"),
        (~old & ((marks & MODULE > 0) | (ended == BACKWARD_PASS)), _ACTIVATIONS, "known"),
        (old & (ended == BACKWARD_PASS), _ACTIVATIONS, "older activation"),
    ]
    conditions = [condition for condition, _, _ in rules]
    category = np.select(conditions, [name for _, name, _ in rules], _OTHER)
    evidence = np.select(conditions, [_reason(reason) for _, _, reason in rules], _reason("unknown"))
    left = old & (category == _OTHER) & (facts.line[own.stack] < 0)
    _infer_older(own, left & kept, category, evidence, begun, passes)
    _infer_freed(own, left & ~kept, category, evidence, begun, passes)
    kept_activations = (category == _ACTIVATIONS) & (begun == FORWARD_PASS)
    number = np.append(passes.number, -1)[own.begin]
    casts = weight_casts(own.requested_bytes, number, kept_activations, category == _PARAMETERS, marks & CAST > 0)
    category[casts] = _CASTS
    return category, evidence


class _When(NamedTuple):
    """When each allocation begins and ends.

    Attributes:
        begun: the kind of its pass; -1 if it is older than the events.
        ended: the kind of the pass that frees it; -1 if none does.
        same: whether both are the same pass.
        last: whether it is in use when the events end, in the pass in which it began.
    """

    begun: Array
    ended: Array
    same: Array
    last: Array


def _when(own: Table, events: int, passes: Passes) -> _When:
    kind, number = np.append(passes.kind, -1), np.append(passes.number, -1)
    begin, end = own.begin, np.where(own.end < events, own.end, -1)  # -1 is the last, the row of "none"
    same = (begin >= 0) & (end >= 0) & (kind[begin] == kind[end]) & (number[begin] == number[end])
    rows = np.concatenate((begin, end))
    final = number[rows.max(initial=-1)]
    last = (begin >= 0) & (end < 0) & (number[begin] == final)
    return _When(kind[begin], kind[end], same, last)


def _one_pass(own: Table, wanted: Array, passes: Passes) -> Array:
    """Return the sizes of the wanted allocations of the pass that has the most bytes of them."""
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return np.empty(0, np.int64)
    numbers = passes.number[own.begin[rows]]
    most = np.bincount(numbers, own.bytes[rows]).argmax()
    sizes: Array = own.requested_bytes[rows[numbers == most]]
    return sizes


def _paired(own: Table, rows: Array, sizes: Array) -> Array:
    """Return for each row how many others of its size come before it, divided by how often ``sizes`` has its size.

    Sizes that it does not have give a large number.
    """
    order = np.lexsort((rows, own.requested_bytes[rows]))
    size = own.requested_bytes[rows[order]]
    first = np.searchsorted(size, size)
    known, times = np.unique(sizes, return_counts=True)
    place = np.minimum(np.searchsorted(known, size), max(len(known) - 1, 0))
    found = known[place] == size if len(known) else np.zeros(len(size), bool)
    result = np.empty(len(rows), np.int64)
    times = times[place] if len(known) else np.ones(len(size), np.int64)
    result[order] = np.where(found, (np.arange(len(size)) - first) // times, len(size) + 1)
    return result


def _infer_older(own: Table, left: Array, category: Array, evidence: Array, begun: Array, passes: Passes) -> None:
    """Tell parameters from state of the optimizer among what is older than the events and in use to their end."""
    rows = np.flatnonzero(left)
    sizes = _one_pass(own, (category == _GRADIENTS) & (begun == BACKWARD_PASS), passes)
    turn = _paired(own, rows, sizes)
    size = own.requested_bytes[rows]
    matched = turn <= len(rows)
    times = int(size[matched].sum() / max(int(sizes.sum()), 1) + 0.05)  # as many bytes as the gradients have
    category[rows], evidence[rows] = _PARAMETERS, _reason("older")
    evidence[rows[turn == 0]] = _reason("older parameter")
    states = rows[(turn > 0) & (turn < times)]
    category[states], evidence[states] = _STATE, _reason("older state")


def _infer_freed(own: Table, left: Array, category: Array, evidence: Array, begun: Array, passes: Passes) -> None:
    """Tell activations from gradients among what is older than the events and freed outside a backward pass."""
    for name, reason, pass_ in (
        (_ACTIVATIONS, "older, sized activation", FORWARD_PASS),
        (_GRADIENTS, "older gradient", BACKWARD_PASS),
    ):
        rows = np.flatnonzero(left & (category == _OTHER))
        sizes = _one_pass(own, (category == name) & (begun == pass_), passes)
        found = rows[_paired(own, rows, sizes) == 0]
        category[found], evidence[found] = name, _reason(reason)
