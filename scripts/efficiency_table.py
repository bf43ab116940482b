"""Makes src/instrument/forecast/efficiency.json.gz, the table of measured operators that ships with the package.

``python -m scripts.efficiency_table FOLDER TRACES`` reads NeuSight's measurements in FOLDER and the traces in
TRACES; scripts/forecast/neusight.py and scripts/forecast/traces.py say which.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from instrument.forecast.table import PACKAGED, table_of, write_table

from .forecast.families import build
from .forecast.truth import checks, with_steps


def main(folder: Path, traces: Path) -> None:
    """Write the table, with the errors of steps whose models were left out of it."""
    data = build(folder, traces)
    errors: dict[str, list[float]] = {}
    for check in checks(folder, traces, today=False):
        errors.setdefault(check.step.gpu, []).append(abs(check.error))
    for name, of in with_steps(table_of(data), folder).gpus.items():
        if of.steps:
            error, worst = round(mean(errors[name]), 4), round(max(errors[name]), 4)
            data["gpus"][name]["steps"] = asdict(of.steps) | {"error": error, "worst": worst}
    write_table(data, PACKAGED)
    print(f"{PACKAGED}: {PACKAGED.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
