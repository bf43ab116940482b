"""Tiny data sets in the scripts' formats, from random numbers with a fixed seed."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np


def _idx(path: Path, values: np.ndarray[Any, Any]) -> None:
    """Write bytes in the IDX format of MNIST."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def mnist(root: Path, folder: str = "data", train: int = 80, test: int = 50) -> None:
    """Write MNIST with `train` and `test` random images; the labels repeat 0 to 9."""
    raw = root / folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        _idx(raw / f"{name}-images-idx3-ubyte", random.integers(0, 256, (count, 28, 28)))
        _idx(raw / f"{name}-labels-idx1-ubyte", np.arange(count) % 10)


def pictures(root: Path, folder: str, train: int = 16, validation: int = 8) -> None:
    """Write PNG files of 40 by 40 random pixels in two classes, as torchvision's ImageFolder reads them."""
    from PIL import Image

    random = np.random.default_rng(0)
    for split, count in (("train", train), ("validation", validation)):
        for number in range(count):
            path = root / folder / split / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)


def words(root: Path, folder: str, lines: int = 41, other_lines: int = 30) -> None:
    """Write train.txt, valid.txt and test.txt with three words, or four tokens, per line."""
    target = root / folder
    target.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", lines), ("valid", other_lines), ("test", other_lines)):
        text = "\n".join(" ".join(f"w{word}" for word in row) for row in random.integers(0, 20, (count, 3)))
        (target / f"{name}.txt").write_text(f"{text}\n")


def tokens(root: Path, folder: str, size: int = 64, count: int = 2000) -> None:
    """Write train.bin and val.bin with random tokens, and meta.pkl with the size of the vocabulary."""
    target = root / folder
    target.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in ("train", "val"):
        random.integers(0, size, count, dtype=np.uint16).tofile(target / f"{name}.bin")
    (target / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": size}))


def waves(root: Path, folder: str, count: int = 6, length: int = 30) -> None:
    """Write traindata.pt, an array of sine waves."""
    import torch

    starts = np.random.default_rng(0).integers(-80, 80, count)
    wave = np.sin((np.arange(length) + starts[:, None]) / 20.0)
    torch.save(wave, root / folder / "traindata.pt")


def graph(root: Path, folder: str, nodes: int = 1600, words: int = 20) -> None:
    """Write a citation graph in the format of Cora: cora.content and cora.cites."""
    target = root / folder
    target.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    present = random.integers(0, 2, (nodes, words))
    rows = [f"{node}\t" + "\t".join(map(str, present[node])) + f"\tclass{node % 3}" for node in range(nodes)]
    (target / "cora.content").write_text("\n".join(rows) + "\n")
    cites = random.integers(0, nodes, (2 * nodes, 2))
    (target / "cora.cites").write_text("\n".join(f"{one}\t{other}" for one, other in cites) + "\n")
