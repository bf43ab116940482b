"""The table of synchronizing operations, which live detection, dry run, trace audit and suggestions all read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from ...base.findings import Direction, Fix

VALUE = "reads a value back from the GPU"
COUNT = "reads the size of its result back from the GPU"
ERROR = "reads an error code back from the GPU"
CHECK = "reads a check of its arguments back from the GPU"
ZEROS = "reads the number of zeros back from the GPU"
FROM_GPU = "copies from the GPU"
FROM_PAGEABLE = "copies to the GPU from memory that is not pinned"
GATHERED = "copies memory that torch first gathers, as it has gaps or is expanded, pinned or not"
DEVICE = "waits for all work of the device"
STREAM = "waits for the work of a stream"
EVENT = "waits for an event, and the work before it"
FREES = "frees memory, which waits for all work of the device"


@dataclass(frozen=True)
class Operation:
    """An operation that synchronizes, always or with certain arguments.

    Attributes:
        name: its name in reports: the name of the public function or method, or what the line does ("bool").
        cause: why it synchronizes.
        fix: what to do instead.
        direction: direction of the copy, if it is known from the name.
        spellings: further Python functions that reports show under this name.
        operators: special methods and ATen operators that reports show under this name.
        kernels: ATen operators whose CUDA kernel always synchronizes.
        traced_as: the operation that a trace shows in its place; empty if it shows the same.
        typical: whether, of several calls on a line, the call of this name most likely is what synchronizes.
    """

    name: str
    cause: str
    fix: Fix
    direction: Direction | None = None
    spellings: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    traced_as: str = ""
    typical: bool = False


_HOST = 'host = x.to("cpu", non_blocking=True)\ndone = torch.cuda.Event()\ndone.record()  # read when done.query()'
_READ_SELDOM = "Keep the numbers on the GPU and read them only every so many steps."
_COPY = "Copy without blocking, and read the copy once an event shows that it has arrived."
_COMPARE = "Compare on the GPU, and keep the result there."
_ERROR_CHECK = "The CPU reads whether the operation succeeded. The variant *_ex leaves that on the GPU."

MASKED = Fix(
    "Only the GPU knows how many elements are chosen. Compute with the mask itself.",
    "total = x[mask].sum()",
    "total = torch.where(mask, x, 0.0).sum()",
)
TO_GPU = Fix(
    "Let the DataLoader pin its batches (pin_memory=True), and copy without blocking. Data that stays the same, "
    "such as a model, belongs before the loop.",
    'batch = batch.to("cuda")',
    'batch = batch.pin_memory()  # better: DataLoader(..., pin_memory=True)\n'
    'batch = batch.to("cuda", non_blocking=True)',
)  # fmt: skip
TO_CPU = Fix(_COPY, "host = x.cpu()", _HOST)
OTHER = Fix("Move it out of the step; if it must stay, allow it with instrument.allow_sync.")
_UNCHECKABLE = Fix(
    "The CPU reads whether the operation succeeded, and no variant skips that check: keep it out of most steps."
)
_PRINT = Fix(
    "Collect the numbers on the GPU and print them only every so many steps.",
    "print(loss)",
    "losses.append(loss.detach())",
)
_FLOAT = Fix(_READ_SELDOM, "total += float(loss)", "total += loss.detach()")
_TENSOR = Fix(
    "Create it once before the loop, or let the GPU fill it: torch.full, torch.zeros, torch.arange.",
    'scale = torch.tensor(0.1, device="cuda")',
    'scale = torch.full((), 0.1, device="cuda")',
)
SAVE = Fix(
    "Copy without blocking, and let a thread write the file once an event shows that the copy has arrived.",
    "torch.save(model.state_dict(), path)",
    'state = {name: value.to("cpu", non_blocking=True) for name, value in model.state_dict().items()}',
)
CLIP = Fix(
    "Leave out the check: a norm that is not finite shows in the loss, and a GradScaler skips the step.",
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)",
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
)
_INV = Fix(_ERROR_CHECK, "inverse = torch.linalg.inv(a)", "inverse, info = torch.linalg.inv_ex(a)")
_NONZERO = Fix(MASKED.text, "total = x[mask.nonzero()].sum()", MASKED.after)
_REMOVE_CALL = Fix(
    "Leave it out: reading a result waits by itself. To measure time, record events.",
    "torch.cuda.synchronize()",
    "end = torch.cuda.Event(enable_timing=True)\nend.record()",
)

OPERATIONS = (
    # Values
    Operation(
        "item", VALUE, Fix(_READ_SELDOM, "total += loss.item()", "total += loss.detach()"), "D2H",
        operators=("_local_scalar_dense",), kernels=("_local_scalar_dense",), typical=True,
    ),
    Operation("float", VALUE, _FLOAT, "D2H", operators=("__float__",), traced_as="item", typical=True),
    Operation("complex", VALUE, _FLOAT, operators=("__complex__",), traced_as="item"),
    Operation(
        "int", VALUE,
        Fix("Keep the number on the GPU, as a tensor.", "right += int(mask.sum())", "right += mask.sum()"), "D2H",
        operators=("__int__", "__index__"), traced_as="item", typical=True,
    ),
    Operation("index", VALUE, OTHER, traced_as="item"),
    Operation(
        "bool", VALUE,
        Fix(
            "Let the GPU decide: torch.where takes one of two values by the condition.",
            "if loss > 10: loss = limit",
            "loss = torch.where(loss > 10, limit, loss)",
        ),
        "D2H", spellings=("is_nonzero",), operators=("__bool__", "is_nonzero"), kernels=("is_nonzero",),
        traced_as="item", typical=True,
    ),
    Operation(
        "format", VALUE,
        Fix(
            "Collect the numbers on the GPU and format them only every so many steps.",
            'line = f"loss {loss:.3f}"',
            "losses.append(loss.detach())",
        ),
        "D2H", spellings=("str", "repr"), operators=("__format__",), traced_as="item", typical=True,
    ),
    Operation("print", VALUE, _PRINT, "D2H", operators=("__repr__",), traced_as="item", typical=True),
    Operation("equal", VALUE, Fix(_COMPARE, "same = torch.equal(x, y)", "same = (x == y).all()"), typical=True),
    Operation(
        "allclose", VALUE, Fix(_COMPARE, "close = torch.allclose(x, y)", "close = torch.isclose(x, y).all()"),
        typical=True,
    ),
    Operation(
        "contains", VALUE, Fix(_COMPARE, "found = 1.0 in x", "found = (x == 1.0).any()"),
        operators=("__contains__",),
    ),
    # Copies
    Operation("tolist", FROM_GPU, Fix(_COPY, "values = x.tolist()", _HOST), "D2H", traced_as="to", typical=True),
    Operation("cpu", FROM_GPU, TO_CPU, "D2H", traced_as="to", typical=True),
    Operation("numpy", FROM_GPU, TO_CPU, "D2H", operators=("__array__",), traced_as="to", typical=True),
    Operation("array", FROM_GPU, TO_CPU),
    Operation("to", FROM_PAGEABLE, OTHER, operators=("_to_copy",), typical=True),
    Operation("cuda", FROM_PAGEABLE, OTHER, traced_as="to", typical=True),
    Operation("copy_", FROM_PAGEABLE, OTHER, operators=("_copy_from",), traced_as="to", typical=True),
    *(
        Operation(name, FROM_PAGEABLE, _TENSOR, "H2D", traced_as="to", typical=True)
        for name in ("tensor", "as_tensor")
    ),
    *(Operation(name, FROM_PAGEABLE, _TENSOR) for name in ("asarray", "from_numpy")),
    Operation(
        "new_tensor", FROM_PAGEABLE,
        Fix(
            "Create it once before the loop, or let the GPU fill it.",
            "scale = x.new_tensor(0.1)",
            "scale = x.new_full((), 0.1)",
        ),
        "H2D", traced_as="to", typical=True,
    ),
    *(Operation(name, FROM_GPU, SAVE) for name in ("save", "dump", "dumps", "reduce_ex")),
    Operation("pickle", FROM_GPU, SAVE, operators=("__reduce_ex__",)),
    Operation("load", FROM_PAGEABLE, Fix("Load once, before the loop.")),
    # Results whose size depends on the data
    Operation("nonzero", COUNT, _NONZERO, operators=("nonzero_numpy",), kernels=("nonzero",), typical=True),
    Operation("argwhere", COUNT, _NONZERO, kernels=("argwhere",), typical=True),
    Operation("where", COUNT, Fix(MASKED.text, "total = x[torch.where(mask)].sum()", MASKED.after)),
    Operation("getitem", COUNT, MASKED, operators=("__getitem__", "index")),
    Operation(
        "setitem", COUNT,
        Fix(
            "A mask with a tensor as value is turned into indices. A Python number, or torch.where, is not.",
            "x[mask] = scale",
            "x = torch.where(mask, scale, x)",
        ),
        operators=("__setitem__", "index_put", "index_put_", "_index_put_impl_"),
    ),
    Operation(
        "masked_select", COUNT, Fix(MASKED.text, "total = x.masked_select(mask).sum()", MASKED.after),
        kernels=("masked_select",), typical=True,
    ),
    Operation(
        "unique", COUNT,
        Fix(
            "Only the GPU knows how many values there are. Mark which of a known number of classes occur.",
            "classes = torch.unique(labels)",
            "present = torch.nn.functional.one_hot(labels, 10).any(0)",
        ),
        operators=("_unique", "_unique2"), kernels=("_unique", "_unique2"), typical=True,
    ),
    Operation(
        "unique_consecutive", COUNT,
        Fix(
            "Only the GPU knows how many values there are. Mark where a run of equal values starts.",
            "values = torch.unique_consecutive(labels)",
            "starts = torch.diff(labels, prepend=labels[:1] - 1) != 0",
        ),
        kernels=("unique_consecutive",), typical=True,
    ),
    Operation(
        "repeat_interleave", COUNT,
        Fix(
            "Pass the length of the result.",
            "y = torch.repeat_interleave(x, repeats)",
            "y = torch.repeat_interleave(x, repeats, output_size=16)",
        ), typical=True,
    ),
    Operation(
        "isin", COUNT,
        Fix("Large inputs are sorted, which synchronizes; compare pairwise instead: (x[:, None] == y).any(-1)."),
    ),
    Operation(
        "bincount", COUNT,
        Fix(
            "The CPU reads the largest value. Count into a known number of bins.",
            "counts = torch.bincount(labels, minlength=10)",
            "counts = torch.zeros(10, dtype=torch.long, device=labels.device)\n"
            "counts.scatter_add_(0, labels, torch.ones_like(labels))",
        ),
        kernels=("bincount",), typical=True,
    ),
    Operation(
        "histc", "reads the least and the greatest element back from the GPU",
        Fix(
            "Without bounds the CPU reads the least and the greatest value. Count into bins of known bounds.",
            "counts = torch.histc(x, bins=10)",
            "bins = (x.clamp(0, 0.999) * 10).long()\n"
            "counts = torch.zeros(10, device=x.device).scatter_add_(0, bins, torch.ones_like(x))",
        ),
    ),
    Operation(
        "one_hot", VALUE,
        Fix(
            "Without the number of classes the CPU reads the largest label.",
            "y = torch.nn.functional.one_hot(labels)",
            "y = torch.nn.functional.one_hot(labels, num_classes=10)",
        ), typical=True,
    ),
    Operation("coalesce", COUNT, OTHER, operators=("_coalesce",), kernels=("_coalesce",)),
    Operation("to_sparse", COUNT, OTHER, operators=("_to_sparse",), kernels=("_to_sparse", "to_sparse")),
    *(
        Operation(name, COUNT, OTHER, kernels=(name,))
        for name in ("masked_scatter_backward", "unique_dim", "unique_dim_consecutive", "embedding_renorm_")
    ),
    *(
        Operation(f"to_sparse_{layout}", COUNT, OTHER, kernels=(f"_to_sparse_{layout}",))
        for layout in ("csr", "csc", "bsr", "bsc")
    ),
    Operation("nested_tensor_from_mask", COUNT, OTHER, kernels=("_nested_tensor_from_mask",)),
    Operation(
        "nested_tensor_from_mask_left_aligned", VALUE, OTHER, kernels=("_nested_tensor_from_mask_left_aligned",)
    ),
    # Checks
    Operation(
        "fake_quantize_per_channel_affine_cachemask", CHECK, OTHER,
        kernels=("fake_quantize_per_channel_affine_cachemask",),
    ),
    Operation("linalg", ERROR, OTHER),
    Operation(
        "check_errors", ERROR, OTHER, operators=("_linalg_check_errors",), kernels=("_linalg_check_errors",)
    ),
    *(Operation(name, ERROR, _INV) for name in ("inv", "inverse")),
    Operation(
        "cholesky", ERROR,
        Fix(_ERROR_CHECK, "factor = torch.linalg.cholesky(a)", "factor, info = torch.linalg.cholesky_ex(a)"),
        kernels=("cholesky",),
    ),
    Operation("cholesky_inverse", ERROR, OTHER, kernels=("cholesky_inverse",)),
    Operation(
        "solve", ERROR, Fix(_ERROR_CHECK, "y = torch.linalg.solve(a, x)", "y, info = torch.linalg.solve_ex(a, x)")
    ),
    Operation(
        "lu_factor", ERROR,
        Fix(
            _ERROR_CHECK, "lu, pivots = torch.linalg.lu_factor(a)",
            "lu, pivots, info = torch.linalg.lu_factor_ex(a)",
        ),
        kernels=("linalg_lu_factor",),
    ),
    Operation(
        "ldl_factor", ERROR,
        Fix(
            _ERROR_CHECK, "ld, pivots = torch.linalg.ldl_factor(a)",
            "ld, pivots, info = torch.linalg.ldl_factor_ex(a)",
        ),
        kernels=("linalg_ldl_factor",),
    ),
    Operation("svd", ERROR, _UNCHECKABLE, operators=("_linalg_svd",), kernels=("_linalg_svd",)),
    *(Operation(name, ERROR, _UNCHECKABLE) for name in ("svdvals", "eigvalsh", "matrix_rank", "norm", "cond")),
    Operation("eig", ERROR, _UNCHECKABLE, kernels=("linalg_eig",)),
    Operation("eigvals", ERROR, _UNCHECKABLE, kernels=("_linalg_eigvals", "linalg_eigvals")),
    Operation("eigh", ERROR, _UNCHECKABLE, operators=("_linalg_eigh",), kernels=("_linalg_eigh",)),
    Operation("lstsq", ERROR, _UNCHECKABLE, kernels=("linalg_lstsq",)),
    Operation("pinv", ERROR, _UNCHECKABLE, kernels=("linalg_pinv",)),
    Operation("matrix_exp", VALUE, OTHER, kernels=("linalg_matrix_exp",)),
    Operation(
        "ctc_loss", "copies the lengths of its targets to the GPU",
        Fix("Pass the lengths as CPU tensors; copying them to the GPU still synchronizes."),
        operators=("_use_cudnn_ctc_loss",), kernels=("_ctc_loss",),
    ),
    *(Operation(name, VALUE, CLIP) for name in ("clip_grad_norm_", "get_total_norm")),
    # Synchronize with certain arguments only
    *(
        Operation(name, VALUE, OTHER)
        for name in ("fill_", "masked_fill", "index_fill", "linspace", "logspace", "mode")
    ),
    *(Operation(name, CHECK, OTHER) for name in ("normal", "searchsorted", "segment_reduce")),
    *(
        Operation(name, ERROR, OTHER)
        for name in ("inv_ex", "cholesky_ex", "solve_ex", "lu_factor_ex", "ldl_factor_ex")
    ),
    Operation("nanmedian", COUNT, OTHER),
    *(Operation(name, ZEROS, OTHER) for name in ("prod", "cumprod")),
    Operation("cross_entropy", "reads the number of labels that count back from the GPU", OTHER),
    Operation("sparse_coo_tensor", "reads the greatest index back from the GPU", OTHER),
    Operation("make_graphed_callables", "waits for all work of the device before each capture", OTHER),
    # Explicit synchronization
    Operation("synchronize", DEVICE, _REMOVE_CALL, typical=True),
    Operation(
        "empty_cache", FREES,
        Fix(
            "Leave it out of the step: it frees memory that the next step allocates again.",
            "torch.cuda.empty_cache()",
            "pass  # the allocator reuses freed memory by itself",
        ), typical=True,
    ),
    Operation(
        "free", FREES,
        Fix("Memory is returned to the driver. Keep buffers, and leave empty_cache() out of the step."),
    ),
    Operation(
        "barrier", DEVICE, Fix("Collectives order the GPUs by themselves: leave the barrier out of the step.")
    ),
)  # fmt: skip

_BY_NAME = {row.name: row for row in OPERATIONS} | {name: row for row in OPERATIONS for name in row.spellings}
_BY_OPERATOR = {name: row.name for row in OPERATIONS for name in row.operators}
_BY_SPELLING = {name: row.name for row in OPERATIONS for name in row.spellings}
KERNELS = {name: row.cause for row in OPERATIONS for name in row.kernels}
"""Why some ATen operators always synchronize, by their names without namespace and overload."""
TYPICAL_CALLS = frozenset(
    {name for row in OPERATIONS if row.typical for name in (row.name, *row.spellings)}
    | {"backward", "multinomial"}
)
"""Functions and methods that most likely synchronize on a line with several calls."""
_MODULES = re.compile(r"^(?:linalg|fft|special)_(?=[a-z])")


@lru_cache(maxsize=1024)
def operation(op: str) -> Operation | None:
    """Return the row of an operation as reports name it; None if the table has none."""
    return _BY_NAME.get(op) or _BY_NAME.get(op.strip("_").removeprefix("linalg_"))


def name_of_call(function: str) -> str:
    """Return how reports name a call of the Python function ``function``."""
    return _BY_SPELLING.get(function, function)


def name_of_operator(operator: str) -> str:
    """Return how reports name an ATen operator or a special method; its own name if the table has none."""
    return _BY_OPERATOR.get(operator, operator)


def public_name(operator: str) -> str:
    """Return the public name of an ATen operator: without underscores in front and without ``linalg_``."""
    named = operator.strip("_") if operator.startswith("__") else operator.lstrip("_")
    return _BY_OPERATOR.get(operator) or _MODULES.sub("", named)


def name_in_trace(op: str) -> str:
    """Return the operation that a trace shows for ``op``, which live detection names after the line."""
    row = _BY_NAME.get(op)
    return (row.traced_as if row else "") or op


def direction_of(op: str) -> Direction | None:
    """Return the direction of the copy that ``op`` makes, if it is known from the name."""
    row = _BY_NAME.get(op)
    return row.direction if row else None
