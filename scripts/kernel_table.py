"""Writes the table of the kernels that operators of torch launch on CUDA, as the software GPU shows them.

Each operator runs on the sample inputs of torch's own tests, forward and backward. An operator that launches the
same families in three of four calls goes into the table; the others need a rule. It takes ten minutes, with the
CUDA build of torch:

    SIMGPU=1 .venv-cuda/bin/python -m scripts.kernel_table
"""

from __future__ import annotations

import json
import sys
import types
import unittest
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tests import simgpu
from torch.utils._python_dispatch import TorchDispatchMode

from instrument.read.tables.kernel_families import family_of
from instrument.syncs.counting.calls import Call, Memory
from instrument.syncs.counting.kernels import RULES
from instrument.syncs.counting.launches import is_contiguous, is_empty
from instrument.syncs.counting.recorder import described

TABLE = Path(__file__).parents[1] / "src/instrument/syncs/counting/kernel_table.json"
SAMPLES = 6  # of each operator
SHARE = 0.75  # of its calls that must launch the same
Recorded = tuple[Call, tuple[str, ...]]


class Recorder(TorchDispatchMode):
    """Records what each operator launches."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        torch.cuda.synchronize()
        with simgpu.log() as log:
            out = func(*args, **(kwargs or {}))
            torch.cuda.synchronize()
        works = (entry for entry in log if not entry.kind.startswith("wait"))
        families = tuple(family_of(entry.name) if entry.kind == "kernel" else entry.kind for entry in works)
        if func.namespace == "aten":
            self.rows.append((described(memory, func, args, kwargs or {}, out), families))
        return out


def memory(tensor: torch.Tensor) -> Memory:
    """Return where a tensor is."""
    return "gpu" if tensor.is_cuda else "pinned" if tensor.is_pinned() else "cpu"


def recorded() -> Iterator[Recorded]:
    """Yield what the operators of torch's tests launch."""
    expecttest: Any = types.ModuleType("expecttest")  # torch's tests import it, and need it only for other things
    expecttest.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", expecttest)
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in op_db:
        for dtype in {torch.float32, torch.int64} & set(operator.dtypes):
            with Recorder() as recorder:
                try:
                    run(operator, dtype)
                except Exception as error:  # such as solvers, which the software GPU does not have
                    print(f"{operator.name}: {str(error).partition(chr(10))[0]:.100}", file=sys.stderr)
            yield from recorder.rows


def run(operator: Any, dtype: torch.dtype) -> None:
    """Run an operator on its sample inputs, forward and backward."""
    differentiable = operator.supports_autograd and dtype.is_floating_point
    for number, sample in enumerate(operator.sample_inputs("cuda", dtype, requires_grad=differentiable)):
        if number == SAMPLES:
            return
        out = operator(sample.input, *sample.args, **sample.kwargs)
        results = out if isinstance(out, (tuple, list)) else [out]
        for result in results:
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result.sum().backward()
                break


def main() -> None:
    """Write the table."""
    warnings.simplefilter("ignore")
    by_name: dict[str, list[Recorded]] = defaultdict(list)
    with torch.backends.cudnn.flags(enabled=False):
        for call, families in recorded():
            if not is_empty(call):
                by_name[call.name.removeprefix("aten::")].append((call, families))
    operators: dict[str, list[str]] = {}
    copies: dict[str, int] = {}
    for name, rows in sorted(by_name.items()):
        ((usual, times),) = Counter(families for _, families in rows).most_common(1)
        if name in RULES or times < SHARE * len(rows):
            continue
        operators[name] = list(usual)
        gathered = [call for call, families in rows if families == usual]
        if (
            name.endswith("_backward")
            and "copy" in usual
            and not any(is_contiguous(c.tensors[0]) for c in gathered)
        ):
            copies[name] = usual.index("copy")  # of a gradient that is not contiguous, as that of a sum
            operators[name].remove("copy")
    table = {"torch": torch.__version__, "operators": operators, "copies": copies}
    TABLE.write_text(json.dumps(table, indent=0) + "\n", encoding="utf-8")
    print(f"{TABLE}: {len(operators)} operators")


if __name__ == "__main__":
    main()
