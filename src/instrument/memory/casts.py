"""`weight_casts`: which activations are copies of parameters that autocast makes in a lower precision."""

from __future__ import annotations

import numpy as np

from ..traces.table import Array

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
    found = np.zeros(len(size), bool)
    rows = np.flatnonzero(kept & (cast if cast.any() else True))
    if not len(sizes) or not len(rows):
        return found
    place = np.minimum(np.searchsorted(sizes, 2 * size[rows]), len(sizes) - 1)
    fits = sizes[place] == 2 * size[rows]
    rows, place = rows[fits], place[fits]
    keys, which, times = np.unique(
        np.stack((number[rows], place)), axis=1, return_inverse=True, return_counts=True
    )
    few = times <= parameter_count[keys[1]]
    few = few[which.reshape(-1)]
    rows, place = rows[few], place[few]
    total = size[parameters].sum()
    large = (parameter_count > 1) & (sizes * parameter_count >= _LARGE * total)
    for each in np.unique(number[rows]).tolist():
        own = number[rows] == each
        part = (np.bincount(place[own], minlength=len(sizes)) / parameter_count)[large]
        alike = part.min(initial=1) >= _ALIKE * part.max(initial=0)
        if cast.any() or (alike and 2 * size[rows[own]].sum() >= _LEAST * total):
            found[rows[own]] = True
    return found
