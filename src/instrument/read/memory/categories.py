"""What each allocation of a snapshot is for: from its stack or, where that says nothing, from other evidence."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ..tables.lanes import distinct
from ..tables.table import Array, Table
from .passes import (
    BACKWARD_PASS,
    CAST,
    FORWARD_PASS,
    MODULE,
    OPTIMIZER,
    OPTIMIZER_STEP,
    PARAMETERS,
    WORKSPACE,
    ZERO_GRAD,
    Passes,
    StackFacts,
)

_LEAST = 0.5  # of the bytes of the parameters: autocast casts those of all matmuls, a coincidence a few
_LARGE = 0.1  # of these bytes: sizes of parameters, each of which many layers have
_ALIKE = 0.5  # of the most frequent of these sizes


def weight_casts(size: Array, number: Array, kept: Array, parameters: Array, cast: Array) -> Array:
    """Return which allocations of a GPU are casts of parameters, as a mask.

    A cast has half the size of its parameter, and a forward pass casts each at most once: activations of a size
    that is more frequent are none. Where stacks have the frames of C++, one of them is that of a cast; else the
    casts must cover half of the parameters, and no large size that several parameters have may be left out.

    Args:
        size: the size that was asked for.
        number: the pass in which it was allocated.
        kept: a mask of the activations among the allocations.
        parameters: a mask of the parameters.
        cast: a mask of those whose stack has a frame that casts.
    """
    sizes, parameter_count = np.unique(size[parameters], return_counts=True)
    casts = np.zeros(len(size), bool)
    rows = np.flatnonzero(kept & (cast if cast.any() else True))
    if not len(sizes) or not len(rows):
        return casts
    place = np.minimum(np.searchsorted(sizes, 2 * size[rows]), len(sizes) - 1)
    fits = sizes[place] == 2 * size[rows]
    rows, place = rows[fits], place[fits]
    first, which = distinct(number[rows], place)
    few = (np.bincount(which) <= parameter_count[place[first]])[which]
    rows, place = rows[few], place[few]
    total = size[parameters].sum()
    large = (parameter_count > 1) & (sizes * parameter_count >= _LARGE * total)
    for each in np.unique(number[rows]).tolist():
        own = number[rows] == each
        part = (np.bincount(place[own], minlength=len(sizes)) / parameter_count)[large]
        alike = part.min(initial=1) >= _ALIKE * part.max(initial=0)
        if cast.any() or (alike and 2 * size[rows[own]].sum() >= _LEAST * total):
            casts[rows[own]] = True
    return casts


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
_REQUESTED = re.compile("^free_requested$")
_PARAMETERS, _GRADIENTS, _STATE, _ACTIVATIONS, _CASTS, _TEMPORARIES, _WORKSPACE, _OTHER = range(len(_NAMES))

_OF_CUBLAS = (8_519_680, 33_554_432)  # bytes that torch allocates for each handle and stream, the second on Hopper
_FEW_WORKSPACES = 2  # of one stream: cuBLAS and cuBLASLt
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
    "older workspace": "older than the history, in use to its end, of the size that torch gives cuBLAS and no "
    "gradient has; without gradients, one or two of that size",
    "freed by zero_grad": "older than the history, and freed by zero_grad",
    "freed as later ones": "older than the history, and freed on a line that otherwise frees memory of this "
    "category alone",
    "freed in a step": "older than the history, and freed in a step of an optimizer",
    "freed after a call": "older than the history, and freed in a module, on a line that calls one and so drops "
    "the result of the call before, or in forward passes, as the history has no others",
    "older activation": "older than the history, and freed in a backward pass",
    "older, sized activation": "older than the history, and its size is that of an activation of a later pass",
    "older gradient": "older than the history, freed outside backward passes, and of the size of a gradient",
    "unknown": "",
}
"""What an inferred category rests on, by a short name; what is "known" has a line instead."""
_REASONS = list(EVIDENCE)
WEAK = frozenset(
    {"older parameter", "older state", "older", "older workspace", "older, sized activation", "older gradient"}
)
"""Evidence that rests on the age and the size of memory alone; a comparison does not rely on it."""
OLDER = WEAK.union(
    ("freed by zero_grad", "freed as later ones", "freed in a step", "freed after a call", "older activation")
)
"""All evidence for memory that is older than the history."""


def category_words(category: str) -> str:
    """Return what people call a category: "optimizer state"."""
    return category.replace("_", " ")


def page_class(category: str) -> str:
    """Return what pages call a category, which gives its color; on them, "other" is idle time."""
    return "other_memory" if category == "other" else category


def categorize(allocations: Table, events: Table, passes: Passes, facts: StackFacts, stacks: Array) -> Table:
    """Return what the allocations of a `MemorySnapshot` are for, in rows beside them.

    Args:
        allocations: the allocations.
        events: the events.
        passes: the passes of the events.
        facts: what the stacks tell.
        stacks: the stack of each event, that of nothing where it is not known.

    Returns:
        A table with the columns ``category`` (text, of `CATEGORIES`), ``evidence`` (text, of `EVIDENCE`) and
        ``line`` (a row of ``frames``; -1 if there is none).
    """
    category, evidence = (np.zeros(len(allocations), np.int64) for _ in range(2))
    request = _requests(allocations, events)
    stack = np.append(stacks, 0)[request]
    line = np.where(request >= 0, facts.line[stack], -1)
    freed = _Freed(np.append(passes.kind, -1)[request], np.where(request >= 0, facts.marks[stack], 0), line)
    for device in np.unique(allocations.device).tolist():
        rows = np.flatnonzero(allocations.device == device)
        those = _Freed(*(column[rows] for column in freed))
        recorded = bool((events.device == device).any())
        category[rows], evidence[rows] = _of_device(
            allocations.where(rows), those, len(events), recorded, passes, facts
        )
    line = facts.line[allocations.stack]
    evidence[line >= 0] = _reason("known")
    strings = [*_NAMES, *_REASONS]
    return Table({"category": category, "evidence": evidence + len(_NAMES), "line": line}, strings)


def _reason(name: str) -> int:
    return _REASONS.index(name)


class _Freed(NamedTuple):
    """Where each allocation is freed.

    Attributes:
        kind: the kind of the pass; -1 if it is not freed, as for all.
        marks: the marks of the stack; 0 if that is not known.
        line: the row in ``frames`` of its line; -1 if that is not known.
    """

    kind: Array
    marks: Array
    line: Array


def _requests(allocations: Table, events: Table) -> Array:
    """Return the event that asks to free each allocation, or that frees it; -1 if none does.

    Memory that another stream uses is freed later, wherever the allocator looks for such.
    """
    request = np.where(allocations.end < len(events), allocations.end, -1)
    asks = events.matching("action", _REQUESTED)
    freed = np.flatnonzero(request >= 0)
    rows = np.concatenate((np.flatnonzero(asks), request[freed]))
    of = np.concatenate((np.full(asks.sum(), -1), freed))
    order = np.lexsort((rows, events.address[rows], events.device[rows]))
    rows, of = rows[order], of[order]
    places = np.stack((events.device[rows], events.address[rows]))
    asked = np.append(False, (of[:-1] < 0) & (places[:, 1:] == places[:, :-1]).all(axis=0)) & (of >= 0)
    pairs = np.flatnonzero(asked)
    pairs = pairs[rows[pairs - 1] > allocations.begin[of[pairs]]]
    request[of[pairs]] = rows[pairs - 1]
    return request


def _of_device(
    own: Table, freed: _Freed, events: int, recorded: bool, passes: Passes, facts: StackFacts
) -> tuple[Array, Array]:
    """Return the category of each allocation of a device, and the evidence for it.

    Args:
        own: the allocations of the device.
        freed: where each is freed.
        events: the number of events of all devices.
        recorded: whether some are of this device; if none, sizes say nothing.
        passes: the passes of the events.
        facts: what the stacks tell.
    """
    marks = facts.marks[own.stack]
    kind, number = np.append(passes.kind, -1), np.append(passes.number, -1)
    begin, end = own.begin, np.where(own.end < events, own.end, -1)  # -1 is the last, the row of "none"
    begun, ended = kind[begin], kind[end]  # the kinds of the passes; -1 if older than the events, or not freed
    same = (begin >= 0) & (end >= 0) & (begun == ended) & (number[begin] == number[end])
    # in use when the events end, in the pass in which it began
    last = (begin >= 0) & (end < 0) & (number[begin] == number[max(begin.max(initial=-1), end.max(initial=-1))])
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
        (old & (freed.marks & ZERO_GRAD > 0), _GRADIENTS, "freed by zero_grad"),
        (old & (freed.kind == BACKWARD_PASS), _ACTIVATIONS, "older activation"),
    ]
    conditions = [condition for condition, _, _ in rules]
    category = np.select(conditions, [name for _, name, _ in rules], _OTHER)
    evidence = np.select(conditions, [_reason(reason) for _, _, reason in rules], _reason("unknown"))
    left = old & (category == _OTHER) & (facts.line[own.stack] < 0)
    if recorded:
        _infer_older(own, left & kept, category, evidence, begun, passes)
    _infer_by_line(left, category, evidence, freed)
    _infer_state(own, left & (category == _OTHER), category, evidence, begun, freed, passes)
    result = left & ~kept & (evidence == _reason("unknown"))
    forward_alone = (freed.line >= 0) & (not (begun > FORWARD_PASS).any())
    result &= (freed.marks & MODULE > 0) | np.isin(freed.line, facts.calls) | forward_alone
    category[result], evidence[result] = _ACTIVATIONS, _reason("freed after a call")
    _infer_freed(own, left & ~kept, category, evidence, begun, passes)
    kept_activations = (category == _ACTIVATIONS) & (begun == FORWARD_PASS)
    casts = weight_casts(
        own.requested_bytes, number[begin], kept_activations, category == _PARAMETERS, marks & CAST > 0
    )
    category[casts] = _CASTS
    return category, evidence


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
    size, sizes = own.requested_bytes[rows[order]], np.sort(sizes)
    before = np.arange(len(size)) - np.searchsorted(size, size)
    times = np.searchsorted(sizes, size, "right") - np.searchsorted(sizes, size)
    result = np.empty(len(rows), np.int64)
    result[order] = np.where(times > 0, before // np.maximum(times, 1), len(size) + 1)
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
    for of_cublas in _OF_CUBLAS:
        workspaces = rows[~matched & (size == of_cublas)]
        # Every parameter that is trained has a gradient of its size; without gradients, a model that has
        # parameters of this size, such as 4096 x 4096 in 16 bits, has many.
        if len(sizes) or len(workspaces) <= _FEW_WORKSPACES:
            category[workspaces], evidence[workspaces] = _WORKSPACE, _reason("older workspace")


def _infer_by_line(left: Array, category: Array, evidence: Array, freed: _Freed) -> None:
    """Give memory that is freed on a line that frees later memory of one category alone that category."""
    later = np.isin(category, (_GRADIENTS, _STATE, _ACTIVATIONS, _OTHER)) & (freed.line >= 0) & ~left
    lines, place = np.unique(freed.line[later], return_inverse=True)
    first = np.full(len(lines), len(_NAMES))
    last = np.zeros(len(lines), np.int64)
    np.minimum.at(first, place, category[later])
    np.maximum.at(last, place, category[later])
    of_one, alone = lines[first == last], first[first == last]
    rows = np.flatnonzero(left & np.isin(freed.line, of_one))
    category[rows] = alone[np.searchsorted(of_one, freed.line[rows])]
    evidence[rows] = _reason("freed as later ones")


def _infer_state(
    own: Table, left: Array, category: Array, evidence: Array, begun: Array, freed: _Freed, passes: Passes
) -> None:
    """Find state of the optimizer among what is older than the events and freed in a step of it.

    A step that makes new state frees as much; what else it frees of these sizes are gradients, most likely.
    """
    rows = np.flatnonzero(left & (freed.kind == OPTIMIZER_STEP))
    new = _one_pass(own, (category == _STATE) & (begun == OPTIMIZER_STEP), passes)
    turn = _paired(own, rows, new)
    unlike = (turn > len(rows)) & (freed.marks[rows] & OPTIMIZER > 0)
    states = rows[(turn == 0) | unlike]
    category[states], evidence[states] = _STATE, _reason("freed in a step")


def _infer_freed(own: Table, left: Array, category: Array, evidence: Array, begun: Array, passes: Passes) -> None:
    """Tell activations from gradients among what is older than the events and freed outside a backward pass."""
    for name, reason, pass_ in (
        (_ACTIVATIONS, "older, sized activation", FORWARD_PASS),
        (_GRADIENTS, "older gradient", BACKWARD_PASS),
    ):
        rows = np.flatnonzero(left & (category == _OTHER))
        sizes = _one_pass(own, (category == name) & (begun == pass_), passes)
        sized = rows[_paired(own, rows, sizes) == 0]
        category[sized], evidence[sized] = name, _reason(reason)
