"""Wraps functions, generators, coroutines and classes, each at the lowest idle cost.

A plain function gets a wrapper with its own signature: passing arguments on by name costs half of
``*args, **kwargs``. Wrappers are closures, which torch.compile traces through; it would silently bypass an
object with ``__call__``.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ...base.patch import TRANSPARENT, transparent
from . import dispatch
from .region import Region

Maker = Callable[[Callable[..., Any], Callable[[], dispatch.Token], str, ModuleType], FunctionType]

# {names} is the parameter list, {call} the same as arguments. Under Dynamo `tracing()` is the constant True, so
# that `recording` is never read there: if it were, Dynamo would guard on it and recompile when it changes.
# The closure holds only functions and strings: Dynamo must be able to rebuild it for an object made inside the
# graph.
_TEMPLATE = """
def make(_function_, _enter_, _name_, _dispatch_):
    def wrapper({names}):
        if _dispatch_.tracing():
            _dispatch_.hide(_name_)
            return _function_({call})
        if _dispatch_.recording:
            _token_ = _enter_()
            try:
                return _function_({call})
            finally:
                _dispatch_.leave(_token_)
        return _function_({call})
    return wrapper
"""
_RESERVED_NAMES = {"_function_", "_enter_", "_name_", "_dispatch_", "_token_"}
_GENERIC_SIGNATURE = ("*args, **kwargs", "*args, **kwargs")


@lru_cache(maxsize=1024)
def _maker(names: str, call: str) -> Maker:
    namespace: dict[str, Maker] = {}
    exec(compile(_TEMPLATE.format(names=names, call=call), TRANSPARENT, "exec"), namespace)
    return namespace["make"]


def _parameters(code: CodeType) -> tuple[str, str]:
    """Return the parameter list of ``code`` and the arguments that pass each parameter on, as source text."""
    count, only = code.co_argcount, code.co_kwonlyargcount
    positional, keywords = code.co_varnames[:count], code.co_varnames[count : count + only]
    rest = list(code.co_varnames[count + only :])
    names, call = list(positional), list(positional)
    if code.co_posonlyargcount:
        names.insert(code.co_posonlyargcount, "/")
    if code.co_flags & inspect.CO_VARARGS:
        variadic = "*" + rest.pop(0)
        names.append(variadic)
        call.append(variadic)
    elif keywords:
        names.append("*")
    names += keywords
    call += [f"{name}={name}" for name in keywords]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        variadic = "**" + rest.pop(0)
        names.append(variadic)
        call.append(variadic)
    used = {name.lstrip("*") for name in names} - {"", "/"}
    if used & _RESERVED_NAMES or not all(name.isidentifier() and not keyword.iskeyword(name) for name in used):
        return _GENERIC_SIGNATURE
    return ", ".join(names), ", ".join(call)


def _plain(function: Callable[..., Any], region: Region) -> FunctionType:
    def enter() -> dispatch.Token:  # `dispatch.enter`, without the call
        emitter = dispatch.current
        try:
            if region.is_backward:
                return dispatch.enter(region)
            return emitter.pop, emitter.push(region)
        except Exception as error:
            return dispatch.drop_failed(emitter, error)

    if not isinstance(function, FunctionType):
        return _maker(*_GENERIC_SIGNATURE)(function, enter, region.name, dispatch)
    parameters = _parameters(function.__code__)
    made = _maker(*parameters)(function, enter, region.name, dispatch)
    # Each wrapper has its own code object: Dynamo caches by code object and gives up after a few entries on one.
    code = made.__code__.replace(co_name=function.__name__)
    # With the function's own globals: torch.jit.script compiles its source and looks names up there.
    wrapper = FunctionType(code, function.__globals__, function.__name__, closure=made.__closure__)
    if parameters is not _GENERIC_SIGNATURE:
        wrapper.__defaults__ = function.__defaults__
        wrapper.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    return wrapper


def _generator(function: Callable[..., Generator[Any, Any, Any]], region: Region) -> Callable[..., Any]:
    @transparent
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        if dispatch.tracing() or not dispatch.recording:
            return (yield from function(*args, **kwargs))
        token = dispatch.start(region)
        try:
            return (yield from function(*args, **kwargs))
        finally:
            dispatch.leave(token)

    return wrapper


def _coroutine(function: Callable[..., Awaitable[Any]], region: Region) -> Callable[..., Any]:
    @transparent
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not dispatch.recording:
            return await function(*args, **kwargs)
        token = dispatch.start(region)
        try:
            return await function(*args, **kwargs)
        finally:
            dispatch.leave(token)

    return wrapper


def _async_generator(function: Callable[..., AsyncGenerator[Any, Any]], region: Region) -> Callable[..., Any]:
    @transparent
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = function(*args, **kwargs)
        token = dispatch.start(region) if dispatch.recording else None
        try:  # as `yield from` does for a generator
            item = await inner.__anext__()
            while True:
                try:
                    sent = yield item
                except GeneratorExit:
                    raise
                except BaseException as error:
                    item = await inner.athrow(error)
                else:
                    item = await inner.asend(sent)
        except StopAsyncIteration:
            return
        finally:
            try:
                await inner.aclose()
            finally:
                if token is not None:
                    dispatch.leave(token)

    return wrapper


_OF_COMPILED = ("_isolate_recompiles_id", "get_compiler_config")


def _copy_metadata(wrapper: Any, wrapped: Any, region: Region) -> Any:
    """Give ``wrapper`` the name, documentation, signature and attributes of ``wrapped``."""
    functools.update_wrapper(wrapper, wrapped)
    for name in [name for name in vars(wrapper) if name.startswith("_torchdynamo") or name in _OF_COMPILED]:
        delattr(wrapper, name)  # they describe `wrapped`: torch.compile would mistake the wrapper for it
    wrapper.__annotated__ = region.name
    return wrapper


def function(wrapped: Callable[..., Any], region: Region) -> Any:
    """Return ``wrapped`` with ``region`` around each call (each run, for code that is suspended in between)."""
    if inspect.isasyncgenfunction(wrapped):
        make: Callable[..., Any] = _async_generator
    elif inspect.iscoroutinefunction(wrapped):
        make = _coroutine
    elif inspect.isgeneratorfunction(wrapped):
        make = _generator
    else:
        make = _plain
    wrapper = make(wrapped, region)
    if getattr(getattr(wrapped, "__code__", None), "co_flags", 0) & inspect.CO_ITERABLE_COROUTINE:
        wrapper = types.coroutine(wrapper)
    return _copy_metadata(wrapper, wrapped, region)


def class_(wrapped: type, make: Callable[[Any, str], Any]) -> type:
    """Replace the public methods of ``wrapped``, in place, by ``make(method, name)``; annotated ones stay."""
    for name, member in list(vars(wrapped).items()):
        inner = getattr(member, "__func__", member)
        public = not name.startswith("_") or name == "__call__"
        if public and isinstance(inner, FunctionType) and not hasattr(inner, "__annotated__"):
            setattr(wrapped, name, make(member, name))
    return wrapped
