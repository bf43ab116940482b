"""Writes docs/forecast.md."""

from __future__ import annotations

import sys
from math import exp, log
from pathlib import Path
from statistics import mean

from instrument.forecast.gpus import GPUS
from instrument.forecast.steps import step_time
from instrument.forecast.table import Steps, Table, table_of

from . import neusight
from .efficiency_table import build
from .forecast_programs import MODELS, calls


def forecasts(folder, table, today, kinds=("train", "inf")):
    for step in neusight.steps(folder):
        if step.parallel == "single" and step.model in MODELS and step.kind in kinds:
            sequence = calls(folder, step.model, step.sequence, step.batch, step.kind == "train", today)
            yield step, step_time(sequence, GPUS[step.gpu], table)


def main(folder: Path):
    import pickle, os
    for today in (False, True):
        rows = []
        for model in MODELS:
            table = table_of(build(folder, without=model))
            all_ = list(forecasts(folder, table, today))
            factors = {}
            for gpu in GPUS:
                logs = [log(s.ms / (t.ns / 1e6)) for s, t in forecasts(folder, table, False) if s.gpu == gpu and s.model != model]
                if logs: factors[gpu] = exp(mean(logs))
                tl = [log(s.ms / (t.ns / 1e6)) for s, t in forecasts(folder, table, False) if s.gpu == gpu and s.model != model and s.kind=='train']
                if tl: factors[gpu,'train'] = exp(mean(tl))
            for s, t in all_:
                if s.model == model:
                    rows.append((s, t, t.ns / 1e6 / s.ms, factors.get(s.gpu, 1), factors.get((s.gpu,'train'),factors.get(s.gpu,1))))
        print("today" if today else "then")
        rows.sort(key=lambda r: (r[0].gpu, r[0].kind, r[0].model))
        for s, t, r, f, ft in rows:
            print(f"{s.gpu:5}{s.kind:6}{s.model:11}{s.sequence:5}{s.batch:3} {s.ms:8.1f} raw {r:.3f} factor {f:.3f} -> {r*f:.3f}  trainfactor {ft:.3f} -> {r*ft:.3f} cpu {t.cpu_ns/1e6:.0f} gpu {t.gpu_ns/1e6:.0f} bound {t.bound_share:.3f} range {t.least_ns/t.ns:.2f} {t.most_ns/t.ns:.2f}")
        for g in ("h100", "a100", "l4", "v100", "t4"):
            for k in ("train", "inf"):
                e = [abs(r - 1) for s, t, r, f, ft in rows if s.gpu == g and s.kind == k]; e2 = [abs(r * f - 1) for s, t, r, f, ft in rows if s.gpu == g and s.kind == k]; e3 = [abs(r * ft - 1) for s, t, r, f, ft in rows if s.gpu == g and s.kind == k]
                if e: print(g, k, len(e), f"raw {mean(e):.3f} {max(e):.3f}  factor {mean(e2):.3f} {max(e2):.3f}  trainfactor {mean(e3):.3f} {max(e3):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
