"""megatron.core's ``nvtx_range_push``, ``nvtx_range_pop`` and ``nvtx_decorator`` open regions instead of ranges.

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
from types import FrameType, ModuleType
from typing import Any

from ...guard import guard
from ...imports import loaded_modules
from ...patch import Change, Patch
from ...regions import dispatch, region
from .adapter import MegatronAdapter
from .references import FEATURE, ReferencesPatch
from .wrap import with_region

DECORATOR = "nvtx_decorator"


def patches(adapter: MegatronAdapter, utils: ModuleType) -> Iterator[Change]:
    """Yield the changes to ``megatron.core.utils``, and to the functions decorated so far."""
    before = vars(utils).get(DECORATOR)
    decorated = [found for module in _modules_with(before) for found in _decorated(module)]
    makers = {"nvtx_range_push": _push, "nvtx_range_pop": _pop, DECORATOR: _decorator}
    yield ReferencesPatch(utils, {name: functools.partial(make, adapter) for name, make in makers.items()})
    for owner, name, arguments in decorated:
        yield Patch(owner, name, functools.partial(_decorate, adapter, **arguments))


def _name(frame: FrameType, message: str | None, suffix: str | None) -> str:
    """Return Megatron's name for a range: ``message``, or the path of the function in ``frame``."""
    name = message or f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
    return f"{name}.{suffix}" if suffix is not None else name


def _push(adapter: MegatronAdapter, original: Callable[..., None]) -> Callable[..., None]:
    def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
        """Open a region."""
        if dispatch.tracing():
            return
        if not adapter.attached:
            original(_name(sys._getframe(1), msg, suffix))
            return
        try:
            if dispatch.recording:
                frame = sys._getframe(1)
                shown = region.make(_name(frame, msg, suffix), None, None, None, None)
                adapter.ranges.push(shown, frame, owned=msg is None)
        except Exception as error:
            guard.failed(FEATURE, error)

    return nvtx_range_push


def _pop(adapter: MegatronAdapter, original: Callable[..., None]) -> Callable[..., None]:
    def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
        """Close a region and those left open inside."""
        if dispatch.tracing():
            return
        if not adapter.attached:
            original(_name(sys._getframe(1), msg, suffix))
            return
        try:
            if adapter.ranges:
                adapter.ranges.pop(_name(sys._getframe(1), msg, suffix))
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


def _modules_with(decorator: Any) -> list[ModuleType]:
    return [
        module
        for name, module, names in loaded_modules()
        if name.startswith("megatron.") and decorator is not None and names.get(DECORATOR) is decorator
    ]


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
