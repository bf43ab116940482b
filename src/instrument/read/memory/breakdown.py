"""`Breakdown`: what the memory at the peak is, by line, module, region, category; how two of them differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ...base.units import size
from .categories import CATEGORIES, EVIDENCE, OLDER, WEAK, category_words
from .timeline import Peak

_Key = TypeVar("_Key", bound=Hashable)


class Place(NamedTuple):
    """A line of the program; of a library where no frame is the program's.

    Attributes:
        file: the path, as the recording machine has it.
        line: the number of the line.
        function: the name of the function.
    """

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line and its function."""
        return f"{self} {self.function}"

    def __str__(self) -> str:
        return f"{'/'.join(self.file.replace(chr(92), '/').split('/')[-2:])}:{self.line}"


NO_HISTORY = (
    "The peak, and what memory is for, are not known, as no history was recorded: call "
    "torch.cuda.memory._record_memory_history() before the steps to look at, or record them with "
    'instrument.profile(memory="snapshot").'
)

Same = tuple[Place | None, tuple[Place, ...], str, str, str]
"""What blocks of one `Use` share: place, modules, region, category and evidence."""


class Use(NamedTuple):
    """Memory in use at the peak that has the same line, modules, region, category and evidence.

    Attributes:
        place: the line that allocated it; None if no frame of Python is known.
        modules: the lines that call the modules around it, the outermost first.
        region: the innermost region that was open; empty if none is known.
        category: one of `CATEGORIES`.
        evidence: a key of `EVIDENCE`: "known" with a line, else what the category was inferred from.
        bytes: how much.
        blocks: in how many blocks.
    """

    place: Place | None
    modules: tuple[Place, ...]
    region: str
    category: str
    evidence: str
    bytes: int
    blocks: int

    @property
    def inferred(self) -> bool:
        """Whether no line is known, but other evidence for the category."""
        return self.place is None and bool(EVIDENCE[self.evidence])

    @property
    def source(self) -> str:
        """The line that allocated it or, without one, what its category was inferred from; else "unknown"."""
        if self.place is not None:
            return self.place.text
        return f"inferred: {self.evidence}" if self.inferred else "unknown"


@dataclass(frozen=True)
class Breakdown:
    """What the memory at the peak of a GPU is. All parts add up to its bytes.

    Attributes:
        peak: the peak; without a history, what was in use when the snapshot was taken.
        reserved_bytes: what the allocator had from the driver then.
        uses: what was in use, the largest first.
        recorded: whether the snapshot has a history of the GPU.
    """

    peak: Peak
    reserved_bytes: int
    uses: tuple[Use, ...]
    recorded: bool = True

    @property
    def cached_bytes(self) -> int:
        """What was reserved at the peak, and not in use; 0 if the snapshot lacks events of segments."""
        return max(self.reserved_bytes - self.peak.bytes, 0)

    @property
    def known_bytes(self) -> int:
        """The bytes whose line is known."""
        return sum(use.bytes for use in self.uses if use.place is not None)

    @property
    def inferred_bytes(self) -> int:
        """The bytes without a line whose category other evidence shows."""
        return sum(use.bytes for use in self.uses if use.inferred)

    @property
    def unknown_bytes(self) -> int:
        """The bytes of which nothing is known."""
        return self.peak.bytes - self.known_bytes - self.inferred_bytes

    @property
    def text(self) -> str:
        """The memory in use by category, the largest first, as a sentence; `NO_HISTORY` says why it has none."""
        if not self.recorded:
            used = f"{size(self.peak.bytes)} of GPU {self.peak.device}"
            return f"{used} in use when the snapshot was taken. {NO_HISTORY}"
        sizes = {category_words(name): sum(both) for name, both in self.by_category().items()}
        order = sorted(sizes.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {size(number)}" for name, number in order if number)
        peak = f"Memory of GPU {self.peak.device} at its peak: {size(self.peak.bytes)} in use"
        return f"{peak}{': ' * bool(parts)}{parts}."

    def by_line(self) -> dict[tuple[Place, str], tuple[int, int]]:
        """Return the known bytes and blocks by line and category, the largest first."""
        return _sums(((use.place, use.category), use.bytes, use.blocks) for use in self.uses if use.place)

    def by_evidence(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return the inferred bytes and blocks by category and evidence, the largest first."""
        return _sums(((use.category, use.evidence), use.bytes, use.blocks) for use in self.uses if use.inferred)

    def by_module(self) -> dict[tuple[Place, ...], tuple[int, int]]:
        """Return the bytes and blocks that were allocated in modules, by the lines that call these."""
        return _sums((use.modules, use.bytes, use.blocks) for use in self.uses if use.modules)

    def by_region(self) -> dict[str, tuple[int, int]]:
        """Return the bytes and blocks that were allocated in regions, by the innermost one."""
        return _sums((use.region, use.bytes, use.blocks) for use in self.uses if use.region)

    def by_category(self) -> dict[str, tuple[int, int]]:
        """Return the known, and the other bytes of each category, in the order of `CATEGORIES`."""
        with_line, other = defaultdict[str, int](int), defaultdict[str, int](int)
        for use in self.uses:
            (other if use.place is None else with_line)[use.category] += use.bytes
        return {name: (with_line[name], other[name]) for name in CATEGORIES}


def _sums(rows: Iterable[tuple[_Key, int, int]]) -> dict[_Key, tuple[int, int]]:
    """Return the sums of bytes and blocks by key, the largest first."""
    by_key = defaultdict[_Key, list[int]](lambda: [0, 0])
    for key, total, blocks in rows:
        sums = by_key[key]
        sums[0] += total
        sums[1] += blocks
    return {key: (total, blocks) for key, (total, blocks) in sorted(by_key.items(), key=lambda item: -item[1][0])}


def add_up(rows: Iterable[tuple[Same, int]]) -> tuple[Use, ...]:
    """Return the uses of blocks, the largest first.

    Args:
        rows: what is the same for all blocks of a use, and the bytes of each block.
    """
    return tuple(Use(*same, *sums) for same, sums in _sums((same, own, 1) for same, own in rows).items())


OLDER_MEMORY = "older_memory"
"""The category of memory that is older than the history, and whose use its size alone suggests at a peak.

Two snapshots of one program may suggest different uses, although the program did not change.
"""
_KEPT = {"parameters", "optimizer_state"}  # sizes hardly tell these apart


class ChangedPart(NamedTuple):
    """A part of the memory at two peaks.

    Attributes:
        category: one of `instrument.read.memory.categories.CATEGORIES`, or `OLDER_MEMORY`.
        name: the line that allocates it, as "FOLDER/FILE:LINE FUNCTION"; without one, "inferred: " and the
            category's evidence, or "unknown". Or the innermost region that was open; empty if none was.
        before_bytes: its size at the first peak.
        after_bytes: its size at the second one.
    """

    category: str
    name: str
    before_bytes: int
    after_bytes: int

    @property
    def change_bytes(self) -> int:
        """By how much it grew."""
        return self.after_bytes - self.before_bytes


def compare_peaks(before: Breakdown, after: Breakdown) -> list[ChangedPart]:
    """Return the parts of two peaks, by line and category, the largest change first.

    All changes add up to the difference of the peaks. A line that moved, as code was added above it, is two parts.
    """
    return _changes(before, after, lambda use: use.source)


def compare_regions(before: Breakdown, after: Breakdown) -> list[ChangedPart]:
    """Return the parts of two peaks, by region and category, the largest change first; they add up, too."""
    return _changes(before, after, lambda use: use.region)


def compare_categories(before: Breakdown, after: Breakdown) -> list[ChangedPart]:
    """Return the parts of two peaks by category, in the order of `CATEGORIES`; they add up, too."""
    order = [*CATEGORIES, OLDER_MEMORY]
    return sorted(_changes(before, after, lambda _: ""), key=lambda part: order.index(part.category))


def comparable(before: Breakdown, after: Breakdown) -> tuple[list[Use], list[Use]]:
    """Return the uses of two peaks, with those that cannot be told apart in both as `OLDER_MEMORY`."""
    guessed = {use.category for use in before.uses + after.uses if use.evidence in WEAK}
    if guessed & _KEPT:
        guessed |= _KEPT

    def told_apart(use: Use) -> Use:
        unsure = use.evidence in OLDER and use.category in guessed
        return use._replace(category=OLDER_MEMORY, evidence="older") if unsure else use

    return list(map(told_apart, before.uses)), list(map(told_apart, after.uses))


def _changes(before: Breakdown, after: Breakdown, name: Callable[[Use], str]) -> list[ChangedPart]:
    sizes = defaultdict[tuple[str, str], list[int]](lambda: [0, 0])
    for place, uses in enumerate(comparable(before, after)):
        for use in uses:
            sizes[use.category, name(use)][place] += use.bytes
    parts = [ChangedPart(*key, *both) for key, both in sizes.items()]
    return sorted(parts, key=lambda part: (-abs(part.change_bytes), part.category, part.name))
