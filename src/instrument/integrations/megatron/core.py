"""What megatron.core does in a step becomes regions: micro-batches, the optimizer, gradients and their data."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ...guard import guard
from ...patch import Change, Patch, apply
from ...regions import dispatch, region
from ...regions.region import DOMAIN, Region, by_name
from .driver import Driver
from .references import FEATURE, Arguments, ReferencesPatch, named

Label = tuple[int | None, str]  # the number of a micro-batch, and the stage


@functools.lru_cache(maxsize=4096)
def labelled(name: str, microbatch: int | None, stage: str) -> Region:
    """Return the region ``name`` with the number of the micro-batch as payload and the stage as category."""
    return Region(name, by_name(name), DOMAIN, category=stage, payload=microbatch)


class Microbatches:
    """Which micro-batch of which stage a forward or backward call is of.

    A schedule hands to ``backward_step`` what ``forward_step`` returned, in whatever order it interleaves them.
    """

    def __init__(self) -> None:
        self._labels: dict[int, Label] = {}  # by the address of the output, which lives until its backward

    def begin(self, call: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Label:
        """Return the label of a call of ``forward_step``."""
        stage = f"stage {_stage()}"
        chunk = call.get("vp_stage", args, kwargs)
        number = call.get("current_microbatch", args, kwargs)
        return number, stage if chunk is None else f"{stage}, chunk {chunk}"

    def done(self, label: Label, result: Any) -> None:
        """Keep the label of a ``forward_step`` that returned ``result``."""
        if len(self._labels) > 100_000:  # nobody goes backward from what a forward alone leaves
            self._labels.clear()
        self._labels[id(_first(result[0]))] = label

    def back(self, output: Any) -> Label:
        """Return the label of the ``backward_step`` from ``output``."""
        return self._labels.pop(id(_first(output)), (None, f"stage {_stage()}"))


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (list, tuple)) and output else output


def _stage() -> int:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.is_initialized():
        return 0
    return int(state.get_pipeline_model_parallel_rank())


def schedules(driver: Driver, module: ModuleType) -> Iterator[Change]:
    """Show each micro-batch of ``megatron.core.pipeline_parallel.schedules``."""
    driver.loop.parts = tuple(part for part in driver.loop.parts if part != "backward")
    microbatches = Microbatches()
    seen: set[int] = set()  # forward step functions

    def begin(model: Any, function: Any) -> None:
        driver.forward(model)
        if id(function) not in seen:
            seen.add(id(function))
            apply(get_batch(driver, function), driver.changes)

    def forward_step(original: Callable[..., Any]) -> Callable[..., Any]:
        given = Arguments(original)

        def following(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with guard.contained("following a micro-batch"):
                begin(given.get("model", args, kwargs), given.get("forward_step_func", args, kwargs))
            if not dispatch.recording:
                return original(*args, **kwargs)
            label: Label = (None, "stage 0")
            with guard.contained("numbering a micro-batch"):
                label = microbatches.begin(given, args, kwargs)
            with driver.ranges.around(labelled("forward", *label), sys._getframe(1)):
                result = original(*args, **kwargs)
            with guard.contained("numbering a micro-batch"):
                microbatches.done(label, result)
            return result

        def when() -> bool:
            return driver.switch.on and not dispatch.tracing()

        return functools.wraps(original)(guard.around(FEATURE, original, following, when))

    def backward_step(original: Callable[..., Any]) -> Callable[..., Any]:
        given = Arguments(original)

        def shown(*args: Any, **kwargs: Any) -> Region:
            return labelled("backward", *microbatches.back(given.get("output_tensor", args, kwargs)))

        return named(original, shown, driver.switch, driver.ranges)

    yield ReferencesPatch(module, {"forward_step": forward_step, "backward_step": backward_step})


def get_batch(driver: Driver, function: Any) -> list[Patch]:
    """Name ``get_batch`` beside the forward step function of a Megatron script, by the convention of them all."""
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(inspect.unwrap(function), "__module__", ""))
    if module is None or not inspect.isfunction(vars(module).get("get_batch")):
        return []
    return [Patch(module, "get_batch", functools.partial(_named, driver, "data"))]


def optimizers(driver: Driver, module: ModuleType) -> Iterator[Change]:
    """Show the step of each optimizer class of ``megatron.core.optimizer``, which ends a step of the loop."""
    base = getattr(module, "MegatronOptimizer", None)
    shown = region.make("optimizer", None, None, None, None)

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        def following(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not driver.switch.on or driver.updating:  # one that others are chained in
                return original(*args, **kwargs)
            driver.updating = True
            try:
                if dispatch.recording:
                    with driver.ranges.around(shown, sys._getframe(1)):
                        result = original(*args, **kwargs)
                else:
                    result = original(*args, **kwargs)
            finally:
                driver.updating = False
            driver.updated()
            return result

        return functools.wraps(original)(guard.around(FEATURE, original, following))

    for kind in _subclasses(base) if base is not None else ():
        if "step" in vars(kind):
            yield Patch(kind, "step", step)


def _subclasses(kind: type) -> list[type]:
    own: list[type] = kind.__subclasses__()
    return list(dict.fromkeys([*own, *(inner for child in own for inner in _subclasses(child))]))


def distributed(driver: Driver, module: ModuleType) -> Iterator[Change]:
    """Show when ``megatron.core.distributed`` reduces gradients and gathers parameters, under its own names."""
    final = sys.modules.get(f"{module.__name__}.finalize_model_grads", module)
    yield ReferencesPatch(
        final, {"finalize_model_grads": functools.partial(_named, driver, "finalize_model_grads")}
    )
    kind = getattr(module, "DistributedDataParallel", object)
    for method in ("start_grad_sync", "finish_grad_sync", "start_param_sync"):
        if method in vars(kind):
            yield Patch(kind, method, functools.partial(_named, driver, method))


def _named(driver: Driver, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    shown = region.make(name, None, None, None, None)
    return named(original, lambda *_, **__: shown, driver.switch, driver.ranges)
