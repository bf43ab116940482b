"""Writes the tables of docs/slim.md: how many times smaller the real traces become, and what the bytes hold.

``python -m scripts.slim_page FOLDER`` reads the traces in FOLDER (``make traces`` puts them into build/traces).
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from instrument import SlimTrace, TraceError, slim

PAGE = Path(__file__).parent.parent / "docs" / "slim.md"
_SHOWN = ("tl_h100_owlv2.json.gz", "tl_h100_bert_small.json.gz")
_KINDS = {
    "cpu_op": "operators", "user_annotation": "regions and steps", "python_function": "modules and stacks",
    "cuda_runtime": "calls of the runtime", "cuda_driver": "calls of the runtime", "kernel": "GPU work",
    "gpu_memcpy": "GPU work", "gpu_memset": "GPU work", "cpu_instant_event": "memory", "": "names of lanes",
}  # fmt: skip


class Sample(NamedTuple):
    """A real trace: its name, its size as gzip at level 9 unless it is gzip already, and its slim trace."""

    name: str
    packed_bytes: int
    slim: SlimTrace

    @property
    def factor(self) -> float:
        """How many times smaller the slim trace is, gzip to gzip."""
        return self.packed_bytes / self.slim.bytes


def samples(folder: Path) -> list[Path]:
    """Return the traces of torch.profiler in a folder, except copies that were damaged on purpose."""
    files = [path for pattern in ("*.json.gz", "*.json") for path in folder.rglob(pattern)]
    return sorted(
        path for path in files if "malformed" not in path.name and not path.name.endswith(".slim.json.gz")
    )


def made_slim(path: Path, folder: Path, out: Path) -> Sample | None:
    """Return a sample with its slim trace in ``out``; None for a file that torch.profiler did not write."""
    try:
        made = slim(path, out)
    except (TraceError, ValueError):
        return None
    content = path.read_bytes()
    packed = len(content) if content.startswith(b"\x1f\x8b") else len(gzip.compress(content, 9))
    return Sample(str(path.relative_to(folder)), packed, made)


def kinds(path: Path) -> dict[str, tuple[int, int]]:
    """Return the number of events of each kind in a slim trace, and their bytes if they are packed alone."""
    lines = defaultdict[str, list[str]](list)
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        lines[_KINDS.get(event.get("cat", ""), "others")].append(json.dumps(event, separators=(",", ":")))
    found = {}
    for kind, texts in lines.items():
        packer = zlib.compressobj(9, zlib.DEFLATED, 31, 8, zlib.Z_FILTERED)
        found[kind] = len(texts), len(packer.compress(",\n".join(texts).encode()) + packer.flush())
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def main() -> None:
    """Write the tables."""
    folder = Path(sys.argv[1])
    rows, parts = [], []
    with tempfile.TemporaryDirectory() as made:
        for path in samples(folder):
            sample = made_slim(path, folder, Path(made) / f"{path.name}.slim.json.gz")
            if sample is None:
                continue
            assert not sample.slim.changed, (sample.name, sample.slim.changed)
            sizes = f"{sample.packed_bytes:,} | {sample.slim.bytes:,} | {sample.factor:.1f}"
            rows.append(f"| `{sample.name}` | {sample.slim.source_events:,} | {sample.slim.events:,} | {sizes} |")
            if path.name in _SHOWN:
                named = [f"{kind} {size:,} ({count:,})" for kind, (count, size) in kinds(sample.slim.path).items()]
                parts.append(f"| `{sample.name}` | {', '.join(named)} |")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_with_rows(_with_rows(page, "samples", rows), "kinds", parts), encoding="utf-8")


def _with_rows(page: str, name: str, rows: list[str]) -> str:
    """Return the page with these rows in the table after a comment with this name."""
    table = re.compile(f"(<!-- {name} -->\n\n[^\n]*\n[^\n]*\n).*?\n\n", re.DOTALL)
    return table.sub(lambda found: found[1] + "\n".join(rows) + "\n\n", page, count=1)


if __name__ == "__main__":
    main()
