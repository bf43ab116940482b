"""Reads what Nsight Systems sampled of GPUs, with ``nsys profile --gpu-metrics-devices=all``, as counters."""

from __future__ import annotations

import re

import numpy as np

from ..tables.lanes import map_unique_pairs
from ..tables.table import Array
from .nsight_report import LATEST, MISSING, SAMPLES, NsightReport, event_numbers

# Of some forty metrics, those that say what kernels do: nsys takes 10,000 samples a second of each.
_METRICS = re.compile(
    r"(?:SMs? Active|SM Issue|Tensor Active|DRAM (?:Read|Write) Bandwidth)\b.*%\]|GPC Clock Frequency \[MHz\]"
)
_CLOCK = "[MHz]"
_DEVICE = 0xFF  # of a type: its GPU
_LEAST_HZ = 100_000  # no clock has so many MHz


def read_metrics(report: NsightReport) -> dict[str, Array]:
    """Return the columns of the table of counters, without a thread; empty if nothing was sampled.

    nsys names the clock in MHz and writes it in Hz, which becomes MHz here.
    """
    listed = report.texts("TARGET_INFO_GPU_METRICS", "typeId", "metricId", "metricName")
    names = {
        (kind, metric): name
        for kind, metric, name in listed
        if isinstance(kind, int) and isinstance(metric, int) and _METRICS.fullmatch(str(name))
    }
    if not names:
        return {}
    chosen = ", ".join(map(str, sorted({metric for _, metric in names})))
    rows = report.rows(SAMPLES, ("timestamp", "typeId", "metricId", "value"), f'WHERE "metricId" IN ({chosen})')
    name = map_unique_pairs(
        rows["typeId"], rows["metricId"], lambda *key: report.strings[names[key]] if key in names else -1
    )
    time = rows["timestamp"]
    good = (time > -LATEST) & (time < LATEST) & (rows["value"] != MISSING)
    if not good.all():
        report.lost.add(f"{SAMPLES}: without a time or a value", events=int((~good).sum()))
    good &= name >= 0
    rows, name, value = rows[good], name[good], rows["value"][good].astype(float)
    clocks = [report.strings[text] for text in set(names.values()) if text.endswith(_CLOCK)]
    in_hz = np.isin(name, clocks) & (value > _LEAST_HZ)
    return {
        "start_ns": rows["timestamp"],
        "duration_ns": np.zeros(len(rows), np.int64),
        "event": event_numbers(SAMPLES, rows),
        "name": name,
        "device": rows["typeId"] & _DEVICE,
        "value": np.where(in_hz, value * 1e-6, value),
    }
