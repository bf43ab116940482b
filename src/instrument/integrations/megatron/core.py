"""megatron.core: regions for the parts of a step, and in place of its own NVTX ranges.

They do so whether or not ``configure_nvtx_profiling(True)`` was called, and read one flag while no profiler is
active. Their own NVTX ranges are not emitted, so that nothing shows twice.

Functions that were decorated before Megatron was patched are found in the source: unless NVTX profiling was on by
then, ``nvtx_decorator`` returns the function itself, and no attribute of it shows the decoration.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FrameType, ModuleType
from typing import Any

from ...base.guard import guard
from ...base.imports import loaded_modules
from ...base.patch import Patch
from ...record.regions import dispatch, region
from ...record.regions.region import DOMAIN, Region, by_name
from .adapter import (
    FEATURE,
    CallArguments,
    MegatronAdapter,
    ReferencesPatch,
    name_calls,
    with_region,
    with_region_named,
)

Label = tuple[int | None, str]  # the number of a micro-batch, and its stage


@functools.lru_cache(maxsize=4096)
def labelled(name: str, microbatch: int | None, stage: str) -> Region:
    """Return the region ``name`` with the number of the micro-batch as payload and the stage as category."""
    return Region(name, by_name(name), DOMAIN, category=stage, payload=microbatch)


class Microbatches:
    """Finds the micro-batch and the stage of a forward or backward call.

    A schedule passes the output of ``forward_step`` to ``backward_step``, in whatever order it interleaves them.
    """

    def __init__(self) -> None:
        self._labels: dict[int, Label] = {}  # by the address of the output, which lives until its backward

    def label_forward(self, call: CallArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Label:
        """Return the label of a call of ``forward_step``."""
        stage = f"stage {_stage()}"
        chunk = call.get("vp_stage", args, kwargs)
        number = call.get("current_microbatch", args, kwargs)
        return number, stage if chunk is None else f"{stage}, chunk {chunk}"

    def remember(self, label: Label, result: Any) -> None:
        """Store the label of a ``forward_step`` that returned ``result``."""
        if len(self._labels) > 100_000:  # outputs without a backward, as in an evaluation
            self._labels.clear()
        self._labels[id(_first(result[0]))] = label

    def label_backward(self, output: Any) -> Label:
        """Return the label of the ``backward_step`` from ``output``."""
        return self._labels.pop(id(_first(output)), (None, f"stage {_stage()}"))


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (list, tuple)) and output else output


def _stage() -> int:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.is_initialized():
        return 0
    return int(state.get_pipeline_model_parallel_rank())


def schedules(adapter: MegatronAdapter, module: ModuleType) -> None:
    """Hook ``megatron.core.pipeline_parallel.schedules``: each micro-batch is a region."""
    adapter.loop.leave_out_part("backward")
    microbatches = Microbatches()
    seen: set[int] = set()  # forward step functions

    def begin(model: Any, function: Any) -> None:
        adapter.begin_forward(model)
        if id(function) not in seen:
            seen.add(id(function))
            hook_get_batch(adapter, function)

    def forward_step(original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = CallArguments(original)

        def call(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            with guard.contained("following a micro-batch"):
                begin(arguments.get("model", args, kwargs), arguments.get("forward_step_func", args, kwargs))
            if not dispatch.recording:
                return original(*args, **kwargs)
            label: Label = (None, "stage 0")
            with guard.contained("numbering a micro-batch"):
                label = microbatches.label_forward(arguments, args, kwargs)
            with adapter.ranges.around(labelled("forward", *label), sys._getframe(1)):
                result = original(*args, **kwargs)
            with guard.contained("numbering a micro-batch"):
                microbatches.remember(label, result)
            return result

        def when() -> bool:
            return adapter.attached and not dispatch.tracing()

        return functools.wraps(original)(guard.around(FEATURE, original, call, when))

    def backward_step(original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = CallArguments(original)

        def region_of(*args: Any, **kwargs: Any) -> Region:
            return labelled("backward", *microbatches.label_backward(arguments.get("output_tensor", args, kwargs)))

        return with_region(adapter, original, region_of)

    adapter.apply(ReferencesPatch(module, {"forward_step": forward_step, "backward_step": backward_step}))


def hook_get_batch(adapter: MegatronAdapter, function: Any) -> None:
    """Make ``get_batch``, which Megatron scripts define beside the forward step function, the region "data"."""
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(inspect.unwrap(function), "__module__", ""))
    if module is not None and inspect.isfunction(vars(module).get("get_batch")):
        name_calls(adapter, module, {"get_batch": "data"})


def optimizers(adapter: MegatronAdapter, module: ModuleType) -> None:
    """Hook ``megatron.core.optimizer``: an optimizer's step is a region, and ends a step."""
    base = getattr(module, "MegatronOptimizer", None)
    shown = region.make("optimizer", None, None, None, None)

    def step(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if adapter.updating:  # chained inside another optimizer
            return original(*args, **kwargs)
        adapter.updating = True
        try:
            with adapter.ranges.around(shown, sys._getframe(1)) if dispatch.recording else nullcontext():
                result = original(*args, **kwargs)
        finally:
            adapter.updating = False
        adapter.count_update()
        return result

    for kind in _subclasses(base) if base is not None else ():
        if "step" in vars(kind):
            adapter.wrap(kind, "step", step)


def _subclasses(kind: type) -> list[type]:
    own: list[type] = kind.__subclasses__()
    return list(dict.fromkeys([*own, *(inner for child in own for inner in _subclasses(child))]))


def distributed(adapter: MegatronAdapter, module: ModuleType) -> None:
    """Hook ``megatron.core.distributed``: its collectives are regions."""
    final, name = sys.modules.get(f"{module.__name__}.finalize_model_grads", module), "finalize_model_grads"
    adapter.apply(ReferencesPatch(final, {name: functools.partial(with_region_named, adapter, name)}))
    methods = {name: name for name in ("start_grad_sync", "finish_grad_sync", "start_param_sync")}
    name_calls(adapter, getattr(module, "DistributedDataParallel", object), methods)


DECORATOR = "nvtx_decorator"


def nvtx_ranges(adapter: MegatronAdapter, utils: ModuleType) -> None:
    """Replace the ranges of ``megatron.core.utils``, and those of the functions decorated so far."""
    before = vars(utils).get(DECORATOR)
    modules = [
        module
        for name, module, names in loaded_modules()
        if name.startswith("megatron.") and before is not None and names.get(DECORATOR) is before
    ]
    decorated = [function for module in modules for function in _decorated(module)]
    makers = {"nvtx_range_push": _push, "nvtx_range_pop": _pop, DECORATOR: _decorator}
    bound = {name: functools.partial(make, adapter) for name, make in makers.items()}
    adapter.apply(ReferencesPatch(utils, bound))
    for owner, name, arguments in decorated:
        adapter.apply(Patch(owner, name, functools.partial(_decorate, adapter, **arguments)))


def _range_name(frame: FrameType, message: str | None, suffix: str | None) -> str:
    """Return Megatron's name for a range: ``message``, or the path of the function in ``frame``."""
    name = message or f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
    return f"{name}.{suffix}" if suffix is not None else name


def _push(adapter: MegatronAdapter, original: Callable[..., None]) -> Callable[..., None]:
    def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
        """Open a region."""
        if dispatch.tracing():
            return
        if not adapter.attached:
            original(_range_name(sys._getframe(1), msg, suffix))
            return
        try:
            if dispatch.recording:
                frame = sys._getframe(1)
                shown = region.make(_range_name(frame, msg, suffix), None, None, None, None)
                adapter.ranges.close_finished(frame)
                adapter.ranges.push(shown, frame if msg is None else None)
        except Exception as error:
            guard.failed(FEATURE, error)

    return nvtx_range_push


def _pop(adapter: MegatronAdapter, original: Callable[..., None]) -> Callable[..., None]:
    def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
        """Close a region and those left open inside."""
        if dispatch.tracing():
            return
        if not adapter.attached:
            original(_range_name(sys._getframe(1), msg, suffix))
            return
        try:
            if adapter.ranges:
                adapter.ranges.pop(_range_name(sys._getframe(1), msg, suffix))
        except Exception as error:
            guard.failed(FEATURE, error)

    return nvtx_range_pop


def _decorator(adapter: MegatronAdapter, original: Callable[..., Any]) -> Callable[..., Any]:
    def nvtx_decorator(message: str | None = None, color: str | None = None) -> Callable[[Any], Any]:
        """Return a decorator that opens a region under Megatron's name for the function."""
        if not adapter.attached:
            decorate: Callable[[Any], Any] = original(message=message, color=color)
            return decorate
        return lambda function: _decorate(adapter, function, message, color)

    return nvtx_decorator


def _decorate(
    adapter: MegatronAdapter, function: Any, message: str | None = None, color: str | None = None
) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_decorate(adapter, function.__func__, message, color))
    if getattr(function, "__globals__", {}).get("__name__", "").startswith("nvtx."):  # decorated while NVTX was on
        function = getattr(function, "__wrapped__", function)
    try:
        shown = region.make(message or f"{function.__module__}.{function.__name__}", color, None, None, None)
    except ValueError:  # a color that only NVTX knows
        return _decorate(adapter, function, message)
    return with_region(adapter, function, lambda *_, **__: shown)


def _decorated(module: ModuleType) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Yield the functions that the source of ``module`` decorates: owner, name and the decorator's arguments."""
    try:
        body = ast.parse(inspect.getsource(module)).body
    except (OSError, TypeError, SyntaxError):
        return
    classes = [(vars(module).get(node.name), node.body) for node in body if isinstance(node, ast.ClassDef)]
    for owner, nodes in [(module, body), *classes]:
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in vars(owner or object):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and getattr(call.func, "id", None) == DECORATOR:
                        yield owner, node.name, _literals(call)


def _literals(call: ast.Call) -> dict[str, Any]:
    given = dict(zip(("message", "color"), call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
