"""The counts of a dry run as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...base.printable import shown_name
from ...base.units import count, counted, operations, size
from .calls import PHASES
from .step_counts import StepCounts

_COLUMN = 18
_ROWS = 10


def lines(step: StepCounts, first: StepCounts, steps: int, compiled: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of the counts of a typical step, and what is different in the first.

    Args:
        step: the typical step.
        first: the first one.
        steps: the number of steps.
        compiled: what torch.compile did, in lines; empty if nothing.
    """
    yield f"Counts of step {step.step} of {steps}" if steps > 1 else "Counts of the step"
    usual, before = dict(_rows(step)), dict(_rows(first))
    yield from _named(usual)
    yield from (f"  {name:<{_COLUMN}}{text}" for name, text in compiled)
    changed = {name: text for name, text in before.items() if usual.get(name) != text}
    if step.step != first.step and changed:
        yield ""
        yield "The first step, with what comes before it:"
        yield from _named(changed)
    yield from _modules(step)


def _named(rows: Mapping[str, str]) -> Iterator[str]:
    return (f"  {name:<{_COLUMN}}{text}" for name, text in rows.items())


def _rows(step: StepCounts) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each line."""
    yield "operators", f"{count(step.operators)}, of which {count(step.launching)} launch kernels"
    families = ", ".join(f"{count(number)} {family}" for family, number in step.kernels.items())
    yield "kernels", f"{count(step.kernel_count)}{': ' * bool(families)}{families}"
    if step.compiled_kernels:
        yield "  in graphs", f"{count(step.compiled_kernels)} of torch.compile, counted as eager operators"
    if step.memcpys or step.memsets:
        yield "in GPU memory", f"{counted(step.memcpys, 'memcpy')}, {counted(step.memsets, 'memset')}"
    yield from _flops(step)
    yield "bytes", f"{size(step.read)} read, {size(step.written)} written"
    for each in step.copies:
        kind = "pinned" if each.pinned else "pageable"
        yield f"{each.direction} {kind}", f"{counted(each.count, 'copy', 'copies')}, {size(each.bytes)}"
    yield "synchronizations", count(step.synchronizations)
    for made in step.collectives:
        where = f" in {shown_name(made.group)}" if made.group else ""
        yield made.name.rpartition("::")[2], f"{counted(made.count, 'collective')}{where}, {size(made.bytes)}"
    if step.optimizer:
        yield "optimizer", step.optimizer
    if step.unknown:
        names = ", ".join(f"{count(number)} {shown_name(name)}" for name, number in step.unknown.items())
        yield "unknown kernels", names
    if step.by_data:
        yield "depends on data", ", ".join(map(shown_name, step.by_data))


def _flops(step: StepCounts) -> Iterator[tuple[str, str]]:
    known = f"known for {count(step.priced)} of {count(step.launching)} operators that launch kernels"
    yield "operations", f"{operations(step.flop_count)}; {known}"
    for kind, phases in step.flops.items():
        parts = [f"{phase} {operations(phases[phase])}" for phase in PHASES if phases.get(phase)]
        yield f"  {kind}", ", ".join(parts)


def _modules(step: StepCounts) -> Iterator[str]:
    """Yield a table of the regions, or of the outer modules if there are no regions."""
    rows = step.by("region")
    title = "region"
    if len(rows) < 2:
        merged: dict[str, list[int]] = {}
        for row in step.by("module"):
            values = merged.setdefault(".".join(row.name.split(".")[:2]), [0] * 5)
            values[:] = [one + other for one, other in zip(values, row[1:], strict=True)]
        table, title = merged, "module"
    else:
        table = {row.name: list(row[1:]) for row in rows}
    yield from _table(title, table)


def _table(title: str, table: Mapping[str, list[int]]) -> Iterator[str]:
    if len(table) < 2:
        return
    yield ""
    yield f"  {'operators':>10} {'kernels':>8} {'operations':>12} {'read':>9} {'written':>9}  {title}"
    for name, (operators, kernels, flops, read, written) in list(table.items())[:_ROWS]:
        numbers = f"{count(operators):>10} {count(kernels):>8} {operations(flops):>12}"
        yield f"  {numbers} {size(read):>9} {size(written):>9}  {shown_name(name) or '(none)'}"
    if len(table) > _ROWS:
        yield f"  and {len(table) - _ROWS} more"
