"""DeepSpeed: windows of an engine's optimizer steps, with DeepSpeed's own ranges as regions.

    attach("runs/x", wait=10, active=3)  # before or after `deepspeed.initialize`

A step is an update at the boundary of gradient accumulation, also one that a loss scaler skipped; its number is
``engine.global_steps``. What DeepSpeed decorates with ``instrument_w_nvtx`` or puts between ``range_push`` and
``range_pop`` of its accelerator goes to every profiler that listens, is closed when an error passes through, and
is left out of compiled code.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

import instrument

from ..guard import guard
from ..patch import Patch, transparent
from ..regions import dispatch
from .adapter import Adapter, require
from .environment import loop_from_environment
from .loop import Loop

FEATURE = "following DeepSpeed"
NAMES = {"DeepSpeedEngine.forward": "forward"}  # by the name that DeepSpeed has


def attach(out: str | os.PathLike[str] = "runs/instrument", *, engine: Any = None, **options: Any) -> Adapter:
    """Record windows of an engine's steps, name their parts, and find waits.

    Regions: "step"; "micro-step" where gradients are accumulated; "forward", "backward", "checkpoint", and of a
    pipeline "evaluation"; DeepSpeed's own ranges; the modules, clipping, collectives and optimizer.

    Args:
        out: the folder that windows land in.
        engine: the one whose steps are counted; by default the first that runs forward in training.
        options: as `instrument.integrations.loop.Loop` takes them: the plan (``wait``, ``active``, ...),
            ``syncs``, ``budget``, ``modules``, ``names``, ``tell``.

    Returns:
        What was attached, with ``remove()``; it is a context manager as well.

    Raises:
        TypeError, ValueError: arguments that are not accepted.
        ImportError: DeepSpeed is not installed.
    """
    attachment = Adapter(Loop(out, **options))
    require("deepspeed")
    if engine is not None and not hasattr(engine, "global_steps"):
        raise TypeError(f'"engine" must be what deepspeed.initialize returned first: {engine!r}')
    _follow(attachment, engine)
    return attachment


@functools.cache
def install() -> None:
    """Have DeepSpeed's engines drive the loop that the environment asks for, if it does."""
    loop = loop_from_environment()
    if loop is not None:
        _follow(Adapter(loop), None)


def _follow(attachment: Adapter, engine: Any) -> None:
    def imported(package: ModuleType) -> None:
        Ranges(attachment).route()  # first: the engine's methods are among what is decorated
        Engines(attachment, engine).follow()

    if attachment.on:
        attachment.when_imported("deepspeed", FEATURE, imported)


class Engines:
    """Follows the engines; one of them drives the loop while it is there."""

    def __init__(self, attachment: Adapter, engine: Any) -> None:
        self._attachment = attachment
        self._loop = attachment.loop
        self._driver = None if engine is None else weakref.ref(engine)
        self._parts: list[str] = []  # that are open: "step", "micro-step"

    def follow(self) -> None:
        """Replace the engines' methods."""
        wrap, region = self._attachment.wrap, self._attachment.region
        engine = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
        wrap(engine, "forward", self._forward)
        wrap(engine, "backward", self._backward)
        wrap(engine, "step", self._step)
        wrap(engine, "destroy", self._destroy)
        wrap(engine, "save_checkpoint", region("checkpoint"))
        pipeline = getattr(sys.modules.get("deepspeed.runtime.pipe.engine"), "PipelineEngine", None)
        if pipeline is not None:
            wrap(pipeline, "train_batch", self._train_batch)
            wrap(pipeline, "eval_batch", region("evaluation"))

    def _drives(self, engine: Any) -> bool:
        driver = None if self._driver is None else self._driver()
        if driver is None:
            self._loop.stop()
            self._driver = weakref.ref(engine)
        return driver is None or driver is engine

    def _begin(self, engine: Any) -> None:
        """Open the step that ``engine`` is about to make, and its micro-step, unless they are open."""
        if not self._loop.running:
            self._loop.start(engine.module, first_step=engine.global_steps)
        for part in ("step", *(["micro-step"] if engine.gradient_accumulation_steps() > 1 else [])):
            if part not in self._parts:
                self._parts.append(part)
                self._loop.enter(part)

    def _end(self, part: str) -> None:
        """Close ``part`` and what is open in it."""
        if part in self._parts:
            del self._parts[self._parts.index(part) :]
            self._loop.leave(part)

    def _failing(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException:
            self._end("step")
            raise

    def _forward(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and engine.module.training and self._drives(engine)):
            return original(engine, *args, **kwargs)
        with guard.contained(FEATURE):
            self._begin(engine)
        return self._failing(original, engine, *args, **kwargs)

    def _backward(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._drives(engine):
            return original(engine, *args, **kwargs)
        result = self._failing(original, engine, *args, **kwargs)
        self._end("micro-step")
        return result

    def _step(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._drives(engine):
            return original(engine, *args, **kwargs)
        self._end("micro-step")  # of a backward that the engine was not asked for
        before = engine.global_steps
        result = self._failing(original, engine, *args, **kwargs)
        if engine.global_steps != before:
            self._end("step")
            self._loop.step()
        return result

    def _train_batch(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Follow a pipeline, which makes a whole step in one call and never calls ``step``."""
        if not self._drives(engine):
            return original(engine, *args, **kwargs)
        if not self._loop.running:
            with guard.contained(FEATURE):
                self._loop.start(engine.module, first_step=engine.global_steps)
        with self._loop.region("step"):
            self._parts += ["step", "micro-step"]  # its stages interleave micro-steps
            try:
                result = original(engine, *args, **kwargs)
            finally:
                self._parts.clear()
        self._loop.step()
        return result

    def _destroy(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        if self._driver is not None and self._driver() is engine:
            self._end("step")
            self._loop.stop()
            self._driver = None
        return original(engine, *args, **kwargs)


class Ranges:
    """Makes DeepSpeed's ranges regions."""

    def __init__(self, attachment: Adapter) -> None:
        self._attachment = attachment
        self._thread = threading.local()

    def route(self) -> None:
        """Replace the decorator, what it decorated so far, and the accelerator's methods."""
        decorate = getattr(sys.modules.get("deepspeed.utils.nvtx"), "instrument_w_nvtx", None)
        if decorate is not None:
            decorated = decorate(len).__code__
            for owner in list(_owners()):
                for name, value in list(vars(owner).items()):
                    if value is decorate:
                        self._attachment.apply(Patch(owner, name, self._decorator))
                    elif getattr(value, "__code__", None) is decorated:
                        self._attachment.apply(Patch(owner, name, self._decorated))
        accelerator = type(sys.modules["deepspeed.accelerator"].get_accelerator())
        self._attachment.wrap(accelerator, "range_push", self._push)
        self._attachment.wrap(accelerator, "range_pop", self._pop)

    def _decorator(self, decorate: Callable[..., Any]) -> Callable[..., Any]:
        def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
            return self._region(function, decorate(function))

        return instrument_w_nvtx

    def _decorated(self, decorated: Any) -> Callable[..., Any]:
        contents = (cell.cell_contents for cell in decorated.__closure__)
        return self._region(next(value for value in contents if callable(value)), decorated)

    def _region(self, function: Callable[..., Any], decorated: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with a region around each call; after removal, as DeepSpeed ``decorated`` it."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        name = NAMES.get(name, name)

        @transparent
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if dispatch.tracing():
                return function(*args, **kwargs)
            if not self._attachment.on:
                return decorated(*args, **kwargs)
            if not dispatch.recording:
                return function(*args, **kwargs)
            with instrument.annotate(name):
                depth = self._depth()
                try:
                    return function(*args, **kwargs)
                finally:
                    self._close_to(depth)

        return wrapped

    @guard.contained(FEATURE)
    def _depth(self) -> int:
        return len(self._ranges())

    @guard.contained(FEATURE)
    def _close_to(self, depth: int | None) -> None:
        """Close what was pushed since `_depth` was asked, and never popped because of an error."""
        ranges = self._ranges()
        while depth is not None and len(ranges) > depth:
            self._close(ranges)

    def _ranges(self) -> list[Any]:
        """Return this thread's ranges that were pushed; None stands for one that nobody listened to."""
        if not hasattr(self._thread, "ranges"):
            self._thread.ranges = []
        return self._thread.ranges  # type: ignore[no-any-return]

    def _push(self, _: Callable[..., Any], accelerator: Any, msg: str, *args: Any, **kwargs: Any) -> None:
        region = None
        with guard.contained(FEATURE):
            if dispatch.recording:
                region = instrument.annotate(str(msg))
                region.__enter__()
        self._ranges().append(region)

    def _pop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ranges = self._ranges()
        if not ranges:  # pushed before this was attached
            return original(*args, **kwargs)
        self._close(ranges)
        return None

    @staticmethod
    def _close(ranges: list[Any]) -> None:
        region = ranges.pop()
        if region is not None:
            region.__exit__(None, None, None)


def _owners() -> Iterator[Any]:
    """Return DeepSpeed's modules and their classes."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "deepspeed" and isinstance(module, ModuleType):
            yield module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield value
