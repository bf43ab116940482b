"""Ways to instrument a program, which calls `loop` and `watch`: the variable WAY says which."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")
WAY = os.environ.get("WAY", "plain")
OUT = os.environ.get("OUT", "")
AT = "2-3"


def watch(model: torch.nn.Module) -> torch.nn.Module:
    """Annotate the modules of a model, if that is the way."""
    if WAY == "modules":
        import instrument

        instrument.annotate_modules(model)
    return model


def loop(items: Iterable[T]) -> Iterator[T]:
    """Yield the items of a loop's steps, instrumented."""
    if WAY in ("plain", "run"):
        yield from items
        return
    import instrument

    if WAY == "steps":
        yield from instrument.steps(items, OUT, at=AT)
    elif WAY == "syncs":
        with instrument.detect_syncs() as syncs:
            for item in items:
                yield item
                syncs.step()
    elif WAY == "black_box":
        with instrument.annotate_step(), instrument.black_box() as box:
            for item in items:
                yield item
                box.step()
    else:
        with instrument.profile(OUT, schedule=AT, memory="snapshot" if WAY == "memory" else None) as prof:
            for item in items:
                yield item
                prof.step()
