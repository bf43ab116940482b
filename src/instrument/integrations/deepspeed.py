"""DeepSpeed: windows of an engine's optimizer steps, with DeepSpeed's own ranges as regions.

    attach("runs/x", wait=10, active=3)  # before or after `deepspeed.initialize`

A step is an update at the boundary of gradient accumulation, also one that a loss scaler skipped; its number is
``engine.global_steps``. The ranges of DeepSpeed's ``instrument_w_nvtx``, and of its accelerator's ``range_push``
and ``range_pop``, go to every active profiler, are closed when an error passes through, and do not break compiled
code.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from ..base.guard import guard
from ..base.imports import loaded_modules
from ..base.patch import Patch, transparent
from ..record.regions import dispatch
from ..record.regions import region as regions
from .adapter import Adapter, RangeStack, require, when_requested
from .loop import Loop

__all__ = ["attach", "install"]

FEATURE = "following DeepSpeed"
NAMES = {"DeepSpeedEngine.forward": "forward"}
"""The regions whose names differ from DeepSpeed's."""


class DeepSpeedAdapter(Adapter):
    """Follows one engine at a time, which drives the loop until it is destroyed.

    Args:
        loop: the loop that the engine drives.
        engine: by default the first one whose forward runs in training.
    """

    feature = FEATURE

    def __init__(self, loop: Loop, engine: Any = None) -> None:
        super().__init__(loop)
        if engine is not None:
            self.driver = weakref.ref(engine)
        self._in_pipeline = False  # whose stages interleave micro-steps

    def install_hooks(self) -> None:
        """Hook the engine classes and DeepSpeed's ranges."""
        self.when_imported("deepspeed", self._imported)

    def _imported(self, package: ModuleType) -> None:
        DeepSpeedRanges(self).install_hooks()  # first: DeepSpeed decorates methods of the engine
        engine = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
        self.wrap(engine, "forward", self._forward)
        self.wrap(engine, "backward", self._backward)
        self.wrap(engine, "step", self._step)
        self.wrap(engine, "destroy", self._destroy)
        self.wrap(engine, "save_checkpoint", self.in_region("checkpoint"))
        pipeline = getattr(sys.modules.get("deepspeed.runtime.pipe.engine"), "PipelineEngine", None)
        if pipeline is not None:
            self.wrap(pipeline, "train_batch", self._train_batch)
            self.wrap(pipeline, "eval_batch", self.in_region("evaluation"))

    def _begin(self, engine: Any) -> None:
        """Open the step of ``engine``, and its micro-step, unless they are open."""
        if not self.loop.running:
            self.loop.start(engine.module, first_step=engine.global_steps)
        for part in ("step", *(["micro-step"] if engine.gradient_accumulation_steps() > 1 else [])):
            if not (self._in_pipeline or self.loop.is_open(part)):
                self.loop.enter(part)

    def _call(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what ``call`` returns; close the step if it raises."""
        try:
            return call(*args, **kwargs)
        except BaseException:
            self.loop.leave("step")
            raise

    def _forward(self, original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and engine.module.training and self.claim(engine)):
            return original(engine, *args, **kwargs)
        with guard.contained(FEATURE):
            self._begin(engine)
        return self._call(original, engine, *args, **kwargs)

    def _backward(self, original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self.claim(engine):
            return original(engine, *args, **kwargs)
        result = self._call(original, engine, *args, **kwargs)
        self.loop.leave("micro-step")
        return result

    def _step(self, original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self.claim(engine):
            return original(engine, *args, **kwargs)
        self.loop.leave("micro-step")  # its backward did not go through the engine
        before = engine.global_steps
        result = self._call(original, engine, *args, **kwargs)
        if engine.global_steps != before:
            self.loop.leave("step")
            self.loop.step()
        return result

    def _train_batch(self, original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Follow a pipeline, which makes a step in one call and does not call ``step``."""
        if not self.claim(engine):
            return original(engine, *args, **kwargs)
        if not self.loop.running:
            with guard.contained(FEATURE):
                self.loop.start(engine.module, first_step=engine.global_steps)
        with self.loop.region("step"):
            self._in_pipeline = True
            try:
                result = original(engine, *args, **kwargs)
            finally:
                self._in_pipeline = False
        self.loop.step()
        return result

    def _destroy(self, original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.driver() is engine:
            self.loop.leave("step")
            self.release(engine)
        return original(engine, *args, **kwargs)


@guard.prepared(FEATURE, otherwise=DeepSpeedAdapter.inert)
def attach(
    out: str | os.PathLike[str] = "runs/instrument", *, engine: Any = None, **options: Any
) -> DeepSpeedAdapter:
    """Record windows of an engine's steps, name the parts of a step, and find synchronizations.

    Regions: "step"; "micro-step" if gradients are accumulated; "forward", "backward", "checkpoint", and
    "evaluation" in a pipeline; DeepSpeed's own ranges; the modules, clipping, collectives and optimizer.

    Args:
        out: the folder for the recorded windows.
        engine: the engine whose steps count; by default the first one whose forward runs in training.
        options: the arguments of `instrument.integrations.loop.Loop`: the schedule (``wait``, ``active``, ...),
            ``syncs``, ``budget``, ``modules``, ``names``, ...

    Returns:
        The adapter, which ``detach()`` removes; it is also a context manager.

    Raises:
        TypeError, ValueError: wrong arguments.
        ImportError: DeepSpeed is not installed.
    """
    loop = Loop(out, **options)
    require("deepspeed")
    if engine is not None and not hasattr(engine, "global_steps"):
        raise TypeError(f'"engine" must be the first result of deepspeed.initialize: {engine!r}')
    return DeepSpeedAdapter(loop, engine).attach()


install = when_requested(DeepSpeedAdapter)


class DeepSpeedRanges:
    """Turns DeepSpeed's ranges into regions."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._ranges = RangeStack()

    def install_hooks(self) -> None:
        """Replace the decorator, the functions it has decorated so far, and the accelerator's methods."""
        decorate = getattr(sys.modules.get("deepspeed.utils.nvtx"), "instrument_w_nvtx", None)
        if decorate is not None:
            decorated = decorate(len).__code__
            for owner in list(owners()):
                for name, value in list(vars(owner).items()):
                    if value is decorate:
                        self._adapter.apply(Patch(owner, name, self._decorator))
                    elif getattr(value, "__code__", None) is decorated:
                        self._adapter.apply(Patch(owner, name, self._decorated))
        accelerator = type(sys.modules["deepspeed.accelerator"].get_accelerator())
        self._adapter.wrap(accelerator, "range_push", self._push)
        self._adapter.wrap(accelerator, "range_pop", self._pop)

    def _decorator(self, decorate: Callable[..., Any]) -> Callable[..., Any]:
        def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
            return self._region(function, decorate(function))

        return instrument_w_nvtx

    def _decorated(self, decorated: Any) -> Callable[..., Any]:
        contents = (cell.cell_contents for cell in decorated.__closure__)
        return self._region(next(value for value in contents if callable(value)), decorated)

    def _region(self, function: Callable[..., Any], decorated: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with a region around each call; ``decorated`` is called instead once detached."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        region = regions.make(NAMES.get(name, name), None, None, None, None)

        @transparent
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if dispatch.tracing():
                return function(*args, **kwargs)
            if not self._adapter.attached:
                return decorated(*args, **kwargs)
            if not dispatch.recording:
                return function(*args, **kwargs)
            with self._ranges.around(region, sys._getframe(1)):
                return function(*args, **kwargs)

        return wrapped

    def _push(self, _: Callable[..., Any], accelerator: Any, msg: str, *args: Any, **kwargs: Any) -> None:
        region = None
        with guard.contained(FEATURE):
            region = regions.make(str(msg), None, None, None, None) if dispatch.recording else None
        self._ranges.push(region)

    def _pop(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._ranges:  # pushed before the adapter was attached
            return original(*args, **kwargs)
        return self._ranges.close(len(self._ranges) - 1)


def owners() -> Iterator[Any]:
    """Yield DeepSpeed's modules and their classes."""
    for name, module, names in loaded_modules():
        if name.partition(".")[0] == "deepspeed":
            yield module
            for value in list(names.values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield value
