"""Derives damaged traces from a real one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

ORIGINAL = "tl_h100_bert_small.json.gz"


def write_damaged(folder: Path) -> None:
    """Write the damaged copies of the original in `folder` next to it."""
    packed = (folder / ORIGINAL).read_bytes()
    data = gzip.decompress(packed)
    device = b'{"device": "cpu", "dtype": "float32"}(12): nn.Module: '  # with unescaped quotes
    windows = b"C:\\Users\\x\\torch\\"  # with unescaped backslashes
    samples = {
        "malformed_bare_array.json": json.dumps(json.loads(data)["traceEvents"]).encode(),
        "malformed_truncated.json.gz": packed[: len(packed) * 6 // 10],
        "malformed_truncated_midevent.json": data[: len(data) * 7 // 10],
        "malformed_unescaped_quotes.json": data.replace(b'"name": "nn.Module: ', b'"name": "' + device, 3),
        "malformed_winpath_escape.json": data.replace(b'"name": "torch/', b'"name": "' + windows, 20),
    }
    for name, content in samples.items():
        (folder / name).write_bytes(content)
