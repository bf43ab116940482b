"""What somebody wants to know of a script: its step on some GPUs, on how many, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..syncs.counting.memory import MemoryRecord
from ..syncs.dryrun.largest_batch import search
from ..syncs.dryrun.report import DryRunReport
from .assumed import PARALLEL, Parallel, Plan, as_recorded, assumed
from .forecast import Forecast, forecast_of
from .gpus import Gpu, gpu_named
from .links import MOST_RANKS
from .table import Table

MOST_RUNS = 14
"""With how many batches a script runs at most."""


class Wanted(NamedTuple):
    """What to forecast: on which GPUs, from which table, on how many, and what a script for one does on them."""

    gpus: list[Gpu]
    table: Table
    ranks: int = 1
    parallel: Parallel | None = None

    @classmethod
    def of(cls, names: str, table: Table, ranks: int, parallel: str | None) -> Wanted:
        """Return what the options of a command say.

        Raises:
            ValueError: that cannot be had.
        """
        gpus = [gpu_named(name.strip()) for name in names.split(",")]
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f'"gpus" must be 1 to {MOST_RANKS}, those of one machine: {ranks}')
        kind = next((each for each in PARALLEL if each == parallel), None)
        if parallel is not None and kind is None:
            raise ValueError(f'"parallel" must be one of {", ".join(PARALLEL)}: {parallel!r}')
        if parallel is not None and ranks == 1:
            raise ValueError(f'"parallel" {parallel} needs "gpus" of at least 2: 1')
        return cls(gpus, table, ranks, kind)

    def forecasts(self, report: DryRunReport, batches: Sequence[int | None] | None = None) -> list[Forecast]:
        """Return the forecasts of a run, with the largest batch for each GPU if that is known.

        Raises:
            ValueError: the script uses one GPU, and nobody said what it does on several, or it uses several, and
                somebody did.
        """
        assert report.counts is not None
        found = forecast_of(report.counts.step, self.gpus, self.table, self._plan(report))
        return [
            replace(each, largest_batch=batch)
            for each, batch in zip(found, batches or [None] * len(found), strict=True)
        ]

    def _plan(self, report: DryRunReport) -> Plan:
        """Return the step as each GPU runs it."""
        assert report.counts is not None
        step, memory = report.counts.step, report.memory
        if self.parallel is not None and step.collectives:
            raise ValueError('the script exchanges data itself: leave out "parallel"')
        if self.ranks == 1 or step.collectives:
            return as_recorded(step.span, memory, self.ranks)
        if self.parallel is None:
            raise ValueError(
                f'the step has no collectives: "gpus" {self.ranks} needs "parallel", which must be one of '
                f"{', '.join(PARALLEL)}"
            )
        assert memory is not None and report.allocations is not None
        return assumed(self.parallel, step.span, memory, report.allocations.models, self.ranks)

    def largest_batches(
        self, run: Callable[[int], DryRunReport], start: int, on_run: Callable[[], None] = lambda: None
    ) -> list[int | None]:
        """Return the largest batch that fits into each GPU; None where `MOST_RUNS` do not suffice to find it.

        Args:
            run: runs the script with a batch.
            start: the first batch to try.
            on_run: called after each run.

        Raises:
            ValueError: the script fails with a batch.
        """
        records: dict[int, MemoryRecord] = {}
        more: dict[int, int] = {}  # what the GPU holds at the peak beyond the script's own memory, by batch

        def attempt(batch: int) -> MemoryRecord:
            if batch not in records:
                if len(records) == MOST_RUNS:
                    raise _TooManyRunsError
                report = run(batch)
                if not report.finished or report.allocations is None or report.memory is None:
                    raise ValueError(f"with a batch of {batch} the script ended with {report.ended}")
                records[batch] = report.allocations
                more[batch] = (self._plan(report).peak_bytes or 0) - report.memory.peak_bytes
                on_run()
            return records[batch]

        def largest(gpu: Gpu) -> int | None:
            try:
                return search(attempt, lambda batch: gpu.torch_bytes - more[batch], start)
            except _TooManyRunsError:
                return None

        return [*map(largest, self.gpus)]


class _TooManyRunsError(Exception):
    pass
