"""Command line: ``python -m scripts.traces [--out FOLDER] [--manifest FILE]``."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import repositories
from . import damaged

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "tests" / "data" / "traces.json"
FOLDER = ROOT / "build" / "traces"
CACHE = ROOT / "build" / "trace-repositories"
VARIABLE = "TRACE_REPOSITORIES"


def digest(content: bytes) -> str:
    """Return the SHA-256 of the unpacked `content`, as packing differs between versions of gzip."""
    return hashlib.sha256(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).hexdigest()


def content_of(entry: dict[str, str], clone: Path, commit: str, name: str) -> bytes:
    """Return the trace that `entry` describes, packed if its `name` says so.

    Raises:
        MissingError: the repository does not have the file.
        ValueError: the content is not as expected.
    """
    content = repositories.read_file(clone, commit, entry["path"])
    if "member" in entry:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            member = archive.extractfile(entry["member"])
            assert member is not None, entry["member"]
            content = member.read()
    if digest(content) != entry["sha256"]:
        raise ValueError(
            f"{entry['path']} at {commit[:12]} has another SHA-256 than the manifest has: {digest(content)}"
        )
    if name.endswith(".gz") and content[:2] != b"\x1f\x8b":
        return gzip.compress(content, mtime=0)
    return content


def fetch(manifest: list[dict[str, Any]], folder: Path, cache: Path) -> list[str]:
    """Write the traces of `manifest` that `folder` lacks; return a sentence for each failure."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for source in manifest:
        repository, commit = source["repository"], source["commit"]
        missing = {
            name: entry
            for name, entry in source["files"].items()
            if not (folder / name).is_file() or digest((folder / name).read_bytes()) != entry["sha256"]
        }
        if not missing:
            continue
        try:
            clone = repositories.locate(VARIABLE, repository, commit, cache, whole=False)
        except repositories.MissingError as error:
            failures.append(str(error))
            continue
        for name, entry in missing.items():
            try:
                (folder / name).write_bytes(content_of(entry, clone, commit, name))
            except (repositories.MissingError, ValueError) as error:
                failures.append(str(error))
            else:
                print(f"{name} from {repository}")
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.traces",
        description="Fetch the real traces that tests read; files that are there and intact are kept.",
        epilog=f"Repositories come from GitHub, or from the folder of clones that {VARIABLE} names.",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: build/traces")
    parser.add_argument(
        "--manifest", type=Path, default=MANIFEST, metavar="FILE", help="default: tests/data/traces.json"
    )
    options = parser.parse_args(arguments)
    failures = fetch(json.loads(options.manifest.read_text("utf-8")), options.out, CACHE)
    if (options.out / damaged.ORIGINAL).is_file():
        damaged.write_damaged(options.out)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
