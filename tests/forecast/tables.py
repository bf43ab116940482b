"""A small table of measured operators."""

from __future__ import annotations

from typing import Any

from instrument.forecast.gpus import GPUS
from instrument.forecast.ideal import ideal_ns
from instrument.forecast.operations import Operation, matmul
from instrument.forecast.table import ANY_TYPE, Table, table_of

EFFICIENCY = 0.8
MATMUL_SIZES = [(1, rows, 1024, sums) for rows in (512, 1024, 2048) for sums in (256, 1024, 4096)]
BYTES = [1 << power for power in range(20, 30, 2)]


def element_wise(moved: int, type: str = "fp32", family: str = "element-wise") -> Operation:
    return Operation(family, type, 0, moved, (0,))


def measured(gpu: str, operation: Operation) -> int:
    """Return the time of a GPU that does everything at one efficiency."""
    return round(ideal_ns(operation, GPUS[gpu], (128, 128)) / EFFICIENCY)


def content(*gpus: str, steps: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a table of GPUs that do everything at one efficiency."""
    return {
        "source": "made for tests",
        "borrowed": {"element-wise": 0.11},
        "gpus": {
            gpu: {
                "families": [
                    {
                        "family": "linear", "type": "fp32", "error": 0.05,
                        "sizes": [list(each) for each in MATMUL_SIZES],
                        "ns": [measured(gpu, matmul("linear", "fp32", *each)) for each in MATMUL_SIZES],
                        "tiles": [[128, 128]] * len(MATMUL_SIZES),
                    },
                    {
                        "family": "element-wise", "type": ANY_TYPE, "error": 0.03,
                        "sizes": [[each, 0] for each in BYTES],
                        "ns": [measured(gpu, element_wise(each)) for each in BYTES],
                    },
                ],
                "kernels": {},
                "steps": steps,
            }
            for gpu in gpus
        },
    }  # fmt: skip


def table(*gpus: str, steps: dict[str, Any] | None = None) -> Table:
    return table_of(content(*gpus, steps=steps))
