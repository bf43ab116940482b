"""megatron.core's own ``nvtx_range_push``, ``nvtx_range_pop`` and ``nvtx_decorator`` make regions.

Whether ``configure_nvtx_profiling(True)`` was called does not matter: they cost a flag while nobody listens. Their
own ranges are not drawn as well, so that nothing shows twice.
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
from ...modules.parts import Switch
from ...patch import Change, Patch
from ...regions import dispatch, region
from .driver import Driver
from .range_stack import RangeStack
from .references import FEATURE, ReferencesPatch, named

DECORATOR = "nvtx_decorator"


def patches(driver: Driver, utils: ModuleType) -> Iterator[Change]:
    """Replace the functions of ``megatron.core.utils``, and what the third has decorated so far."""
    switch, ranges = driver.switch, driver.ranges
    before = vars(utils).get(DECORATOR)
    decorated = [found for module in _modules_with(before) for found in _decorated(module)]
    makers = {"nvtx_range_push": _push, "nvtx_range_pop": _pop, DECORATOR: _decorator}
    yield ReferencesPatch(utils, {name: functools.partial(make, switch, ranges) for name, make in makers.items()})
    for owner, name, arguments in decorated:
        yield Patch(owner, name, functools.partial(_decorate, switch, ranges, **arguments))


def _name(frame: FrameType, message: str | None, suffix: str | None) -> str:
    """Return the name that Megatron gives a range: the path of the function in ``frame`` unless it has another."""
    name = message or f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
    return f"{name}.{suffix}" if suffix is not None else name


def _push(switch: Switch, ranges: RangeStack, original: Callable[..., None]) -> Callable[..., None]:
    def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
        """Open a region."""
        if dispatch.tracing():
            return
        if not switch.on:
            original(_name(sys._getframe(1), msg, suffix))
            return
        try:
            if dispatch.recording:
                frame = sys._getframe(1)
                shown = region.make(_name(frame, msg, suffix), None, None, None, None)
                ranges.push(shown, frame, owned=msg is None)
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise

    return nvtx_range_push


def _pop(switch: Switch, ranges: RangeStack, original: Callable[..., None]) -> Callable[..., None]:
    def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
        """Close a region and what was left open inside."""
        if dispatch.tracing():
            return
        if not switch.on:
            original(_name(sys._getframe(1), msg, suffix))
            return
        try:
            if ranges:
                ranges.pop(_name(sys._getframe(1), msg, suffix))
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise

    return nvtx_range_pop


def _decorator(switch: Switch, ranges: RangeStack, original: Callable[..., Any]) -> Callable[..., Any]:
    def nvtx_decorator(message: str | None = None, color: str | None = None) -> Callable[[Any], Any]:
        """Make the function a region, under the name that Megatron gives it."""
        if not switch.on:
            decorate: Callable[[Any], Any] = original(message=message, color=color)
            return decorate
        return lambda function: _decorate(switch, ranges, function, message, color)

    return nvtx_decorator


def _decorate(
    switch: Switch, ranges: RangeStack, function: Any, message: str | None = None, color: str | None = None
) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_decorate(switch, ranges, function.__func__, message, color))
    if getattr(function, "__globals__", {}).get("__name__", "").startswith("nvtx."):  # drawn by Megatron itself
        function = getattr(function, "__wrapped__", function)
    try:
        shown = region.make(message or f"{function.__module__}.{function.__name__}", color, None, None, None)
    except ValueError:  # a colour that NVTX alone knows
        return _decorate(switch, ranges, function, message)
    return named(function, lambda *_, **__: shown, switch, ranges)


def _modules_with(decorator: Any) -> list[ModuleType]:
    held = [(module, getattr(module, "__dict__", {})) for name, module in list(sys.modules.items())
            if name.startswith("megatron.")]  # fmt: skip
    return [module for module, names in held if decorator is not None and names.get(DECORATOR) is decorator]


def _decorated(module: ModuleType) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Find what ``module`` decorates in its source: unless NVTX was on by then, the decorator left no trace."""
    try:
        body = ast.parse(inspect.getsource(module)).body
    except (OSError, TypeError, SyntaxError):
        return
    for owner, nodes in [(module, body), *((vars(module).get(node.name), node.body) for node in body
                                           if isinstance(node, ast.ClassDef))]:  # fmt: skip
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in vars(owner or object):
                for call in node.decorator_list:
                    if (
                        isinstance(call, ast.Call)
                        and isinstance(call.func, ast.Name)
                        and call.func.id == DECORATOR
                    ):
                        yield owner, node.name, _literals(call)


def _literals(call: ast.Call) -> dict[str, Any]:
    given = dict(zip(("message", "color"), call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
