"""Damages memory snapshots: their bytes, their opcodes or their values; reads and shows what comes out.

``python -m tests.memory.fuzzing FIRST COUNT`` tries the files of so many seeds, and prints those that fail.
"""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import instrument
from instrument.base.errors import TraceError
from instrument.read.memory.snapshot import MemorySnapshot
from instrument.show.sections.memory import page_of, page_of_change
from instrument.start.cli import app
from tests.support.memory import peak_kib
from tests.support.shared_traces import FOLDER
from tests.traces.mutants import bytes_of

from .torch_snapshots import ADDED, BEGAN_US, cpp_pickle, snapshot_of

MEMORY = 4 << 30  # of address space, more than the memory used
_EVENTS, _PARTS = 80, 6  # of a real snapshot that stay
_ODD: list[Any] = [
    None, True, 0, -1, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, -1 << 63, -(1 << 63) - 1, 1 << 500, 1.5,
    float("nan"), float("inf"), "", "alloc", "free_completed", "oom", "segment_alloc", "START", "inactive",
    "\n\x1b", "x" * 3000, b"x", [], {}, (),
]  # fmt: skip


def bases() -> list[dict[str, Any]]:
    """Return whole snapshots: of each version of torch, of a window and, if there are any, parts of real ones."""
    found = [snapshot_of(version) for version in ADDED]
    window = snapshot_of("2.13")
    window["external_annotations"] += [
        {
            "name": name, "stage": stage, "device": 0, "time_us": BEGAN_US + at, "source": "instrument",
            "range": number, "thread": thread,
        }
        for number, (name, thread) in enumerate([("ProfilerStep#1", 5), ("forward", 5), ("prefetch", 6)])
        for stage, at in (("START", number), ("END", 12 - number))
    ]  # fmt: skip
    found.append(window)
    for path in sorted(FOLDER.glob("memory/*.pickle")):
        data = pickle.loads(path.read_bytes())
        data["device_traces"] = [events[-_EVENTS:] for events in data["device_traces"]]
        data["segments"] = data["segments"][:_PARTS]
        found.append(data)
    return found


class Mutants:
    """Makes damaged snapshots, each from a seed."""

    def __init__(self) -> None:
        self._bases = bases()

    def whole(self) -> bytes:
        """Return a snapshot that is not damaged."""
        return pickle.dumps(self._bases[0])

    def make(self, seed: int) -> bytes:
        """Return a damaged snapshot."""
        dice = random.Random(seed)
        base = dice.choice(self._bases)
        protocol = dice.choice((2, 4, 5))
        if dice.random() < 0.5:
            base = copy.deepcopy(base)
            _values_of(dice, base)
            return pickle.dumps(base, protocol)
        data = cpp_pickle(base) if dice.random() < 0.3 else pickle.dumps(base, protocol)
        return dice.choice((_opcodes_of, bytes_of))(dice, data)


def _values_of(dice: random.Random, whole: dict[str, Any]) -> None:
    """Replace, remove, repeat or exchange values at up to 20 places."""
    for _ in range(dice.choice((1, 1, 2, 5, 20))):
        holder, keys = _any_holder(dice, whole)
        if not keys:
            continue
        key, other = dice.choice(keys), dice.choice(keys)
        kind = dice.randrange(6)
        if kind < 3:
            holder[key] = copy.copy(dice.choice(_ODD))
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, list):
            holder.extend([holder[key]] * dice.choice((1, 3, 400)))
        else:
            holder[key], holder[other] = holder[other], holder[key]


def _any_holder(dice: random.Random, whole: Any) -> tuple[Any, list[Any]]:
    """Return a list or dictionary somewhere in ``whole``, and its keys."""
    while True:
        keys = list(whole) if isinstance(whole, dict) else list(range(len(whole)))
        inner = [key for key in keys if isinstance(whole[key], (list, dict))]
        if not inner or dice.random() < 0.15:
            return whole, keys
        whole = whole[dice.choice(inner)]


def _opcodes_of(dice: random.Random, data: bytes) -> bytes:
    """Change, remove, repeat or move opcodes, or their numbers, at up to 20 places."""
    starts = [at for _, _, at in pickletools.genops(data)]
    parts = [data[at:end] for at, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    codes = [each.code.encode("latin-1") for each in pickletools.opcodes]
    for _ in range(dice.choice((1, 1, 2, 5, 20))):
        at, other = dice.randrange(1, len(parts)), dice.randrange(1, len(parts))
        kind = dice.randrange(5)
        if kind == 0:
            parts[at] = dice.choice(codes) + parts[at][1:]
        elif kind == 1:
            parts[at] = b""
        elif kind == 2:
            parts[at] = parts[at] * dice.choice((2, 3, 1000))
        elif kind == 3:
            parts[at] = b"".join(parts[other : other + dice.choice((1, 1, 50))])
        else:
            parts[at] = parts[at][:1] + dice.choice((b"\xff", b"\0", b"\x7f")) * (len(parts[at]) - 1)
    return b"".join(parts)


def read_all(path: Path, whole: MemorySnapshot) -> bool:
    """Read a file, show it in each way, and compare it with ``whole``; return whether it is a snapshot."""
    try:
        snapshot = instrument.read_memory(path)
    except TraceError as error:
        assert str(path) in str(error)
        return False
    for device in snapshot.devices[:3]:
        found = snapshot.break_down(device)
        assert found.peak.bytes == found.known_bytes + found.inferred_bytes + found.unknown_bytes
        snapshot.state(device)
        snapshot.growth(device)
        page_of(snapshot, device)
    for device in {*snapshot.devices} & {*whole.devices}:
        page_of_change(whole, snapshot, device)
        page_of_change(snapshot, whole, device)
    diagnosis = instrument.diagnose(path)
    assert {} == diagnosis.failed
    json.loads(diagnosis.to_json())
    assert str(diagnosis)
    for arguments in ([], ["--json"], [str(path)]):
        result = CliRunner().invoke(app, ["memory", str(path), *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0 or "no GPU has memory" in result.output, result.output
        if arguments == ["--json"] and not result.exit_code:
            json.loads(result.output)
    return True


def main(first: int, count: int) -> None:
    """Try the files of ``count`` seeds; print the errors, and as the last line JSON about all files."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    mutants = Mutants()
    read = failed = 0
    slowest = 0.0, 0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        path = Path(folder) / "mutant.pickle"
        path.write_bytes(mutants.whole())
        whole = instrument.read_memory(path)
        for seed in range(first, first + count):
            path.write_bytes(mutants.make(seed))
            began = time.process_time()
            try:
                read += read_all(path, whole)
            except Exception:
                failed += 1
                print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
            slowest = max(slowest, (time.process_time() - began, seed))
    about = {"count": count, "read": read, "failed": failed, "slowest": slowest, "peak_mib": peak_kib() // 1024}
    print(json.dumps(about))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
