"""`annotate` and `mark`: the public way to name code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from threading import get_ident
from types import FrameType, MethodType
from typing import Any, TypeVar, overload

from ...base.config import settings
from ...base.guard import guard
from . import dispatch, region, wrap

_CONTEXTLIB = contextlib.ExitStack.__enter__.__code__.co_filename
FEATURE = "annotate"

# The token of an entered region, its thread (0 in code that may be suspended) and the entry around it in its frame
Entry = tuple[dispatch.Token, int, Any]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C")

# Code that may be suspended inside a with block; later code on the thread is then not nested in the block.
_SUSPENDED = (
    inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR
)


class Annotation:
    """A decorator and a context manager that names code; made by `annotate`.

    One object may be entered many times: nested, from several threads and from interleaved tasks.
    """

    __slots__ = ("_attributes", "_name", "_open", "_region")

    def __init__(self, name: str | None, attributes: tuple[Any, ...]) -> None:
        self._name = name
        self._attributes = attributes
        self._region: region.Region | None = None
        self._open: dict[int, Entry] = {}  # what to close, by the id of the frame that opened it

    def __repr__(self) -> str:
        return f"annotate({self._name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return annotate, (self._name, *self._attributes)  # the open regions are not copied

    def __call__(self, wrapped: C, /) -> C:
        """Return ``wrapped``, annotated."""
        try:
            if dispatch.tracing() or not settings.enabled:
                return wrapped
            return self._decorate(wrapped, self._name)  # type: ignore[no-any-return]
        except (TypeError, ValueError):
            raise
        except Exception as error:
            guard.failed(FEATURE, error)
        return wrapped

    def _decorate(self, wrapped: Any, name: str | None) -> Any:
        again = functools.partial(self._decorate, name=name)
        if isinstance(wrapped, (staticmethod, classmethod)):
            return type(wrapped)(again(wrapped.__func__))
        if isinstance(wrapped, MethodType):  # stays one: copies and pickles depend on the bound object
            return MethodType(again(wrapped.__func__), wrapped.__self__)
        if isinstance(wrapped, property):
            return property(wrapped.fget and again(wrapped.fget), wrapped.fset, wrapped.fdel, wrapped.__doc__)
        if isinstance(wrapped, functools.cached_property):
            return functools.cached_property(again(wrapped.func))
        if isinstance(wrapped, type):
            prefix = name or wrapped.__qualname__
            return wrap.class_(wrapped, lambda method, own: self._decorate(method, f"{prefix}.{own}"))
        if not callable(wrapped) or hasattr(wrapped, "named_modules"):
            raise TypeError(
                "annotate decorates functions, methods, properties and classes; "
                f'for other code use "with instrument.annotate(...)": {wrapped!r}'
            )
        if name is None:
            name = getattr(wrapped, "__qualname__", None) or type(wrapped).__qualname__
        return wrap.function(wrapped, region.make(name, *self._attributes))

    def _begin(self, frame: FrameType) -> None:
        """Open the region for the block that ``frame`` enters."""
        named = self._region
        if named is None:
            if self._name is None:
                return  # `__enter__` raises
            named = self._region = region.make(self._name, *self._attributes)
        code = frame.f_code
        if code.co_filename is _CONTEXTLIB:
            frame = _caller(frame)
            code = frame.f_code
        # Latched here: `_finish` closes these ranges even if other emitters listen by then.
        thread = 0 if code.co_flags & _SUSPENDED else get_ident()  # 0: may resume on another thread
        token: dispatch.Token = dispatch.NO_TOKEN
        if dispatch.recording:
            emitter = dispatch.current
            try:
                if not thread:
                    token = dispatch.start(named)
                elif named.is_backward:
                    token = dispatch.enter(named)
                else:  # `dispatch.enter`, without the call
                    token = emitter.pop, emitter.push(named)
            except Exception as error:
                token = dispatch.drop_failed(emitter, error)
        place, entered = id(frame), self._open
        entered[place] = token, thread, entered.get(place)

    def _finish(self, frame: FrameType) -> None:
        # The same frame opens and closes a with block, also if other threads and tasks run in between. Regions
        # opened by hand in another frame of this thread are closed in reverse order.
        if frame.f_code.co_filename is _CONTEXTLIB:
            frame = _caller(frame)
        place = id(frame)
        entry = self._open.pop(place, None)
        if entry is None:
            thread = get_ident()
            here = (key for key, entry in reversed(list(self._open.items())) if entry[1] == thread)
            place = next(here, 0)
            entry = self._open.pop(place, None)
            if entry is None:
                return  # entered before any emitter was active
        token, _, outer = entry
        if outer is not None:
            self._open[place] = outer
        dispatch.leave(token)

    def __enter__(self) -> Annotation:
        try:
            if dispatch.tracing():
                dispatch.hide(self._name or "")
                return self
            if dispatch.recording or self._open:
                self._begin(sys._getframe(1))
        except Exception as error:
            guard.failed(FEATURE, error)
        if self._name is None:
            raise TypeError('annotate needs a name here: with instrument.annotate("name"): ...')
        return self

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        try:
            if self._open and not dispatch.tracing():
                self._finish(sys._getframe(1))
        except Exception as failure:
            guard.failed(FEATURE, failure)

    async def __aenter__(self) -> Annotation:
        try:
            if dispatch.recording or self._open:
                self._begin(sys._getframe(1))
        except Exception as error:
            guard.failed(FEATURE, error)
        if self._name is None:
            raise TypeError('annotate needs a name here: async with instrument.annotate("name"): ...')
        return self

    async def __aexit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        try:
            if self._open:
                self._finish(sys._getframe(1))
        except Exception as failure:
            guard.failed(FEATURE, failure)


def _caller(frame: FrameType) -> FrameType:
    """Return the frame that uses the ExitStack whose method runs in ``frame``."""
    while frame.f_code.co_filename is _CONTEXTLIB and frame.f_back is not None:
        frame = frame.f_back
    return frame


# Annotations that are a name alone, by that name: making one costs more than entering it. Bounded, since names
# made in a loop (f"batch {i}") would otherwise be kept forever.
_by_name: dict[Any, Annotation] = {}
_MAX_BY_NAME = 1024


class _DisabledAnnotation(Annotation):
    """Returned by `annotate` under ``INSTRUMENT=0``; does nothing."""

    __slots__ = ()

    def __enter__(self) -> Annotation:
        return self

    async def __aenter__(self) -> Annotation:
        return self


@overload
def annotate(message: F, /) -> F: ...
@overload
def annotate(
    message: str | None = None,
    color: str | int | None = None,
    domain: str | None = None,
    category: str | int | None = None,
    payload: Any = None,
) -> Annotation: ...
def annotate(
    message: Any = None,
    color: str | int | None = None,
    domain: str | None = None,
    category: str | int | None = None,
    payload: Any = None,
) -> Any:
    """Name a stretch of code, for every profiler that listens.

    As a decorator, bare or called, for functions, methods (also static, class and async ones), generators,
    properties and classes (their public methods); as a context manager, also ``async with``. Without a
    listening profiler a call reads one flag, after asking torch whether it is being compiled.

    Args:
        message: the region's name; for a decorator, by default the qualified name of the decorated object.
        color: an integer 0xRRGGBB or 0xAARRGGBB, "#RRGGBB", or a color's name; by default one that depends
            on the name alone. Shown by NVTX tools.
        domain: the NVTX or ITT domain; by default "instrument".
        category: the NVTX category, a name or a number.
        payload: shown by NVTX tools with each range: a number, or numbers in a list, tuple, range, bytes or
            numpy array, with the values that they have when first shown.

    Raises:
        TypeError: an argument of a type other than these, or something that cannot be decorated.
        ValueError: an unknown color.

    Example:
        >>> @annotate("attention", color="green")
        ... def attention(q, k, v): ...
        >>> with annotate("data"):
        ...     batch = next(loader)
    """
    try:
        # While Dynamo traces, it would guard on the names in the table
        alone = (
            color is None and domain is None and category is None and payload is None and not dispatch.tracing()
        )
        if alone:
            try:
                return _by_name[message]
            except (KeyError, TypeError):  # another name, or an object to decorate that has no hash
                pass
        if message is None or isinstance(message, str):
            if not (color is None and domain is None and category is None and payload is None):
                region.check(color, domain, category, payload)
            attributes = (color, domain, category, payload)
            made = (Annotation if settings.enabled else _DisabledAnnotation)(message, attributes)
            if alone and message is not None and len(_by_name) < _MAX_BY_NAME:
                _by_name[message] = made
            return made
        if not (callable(message) or hasattr(message, "__func__") or hasattr(message, "__get__")):
            raise TypeError(f'"message" must be a string, or the object to decorate: {message!r}')
        return Annotation(None, (color, domain, category, payload))(message)
    except (TypeError, ValueError):
        raise
    except Exception as error:
        guard.failed(FEATURE, error)
    return _DisabledAnnotation(message, (None,) * 4) if message is None or isinstance(message, str) else message


@guard.prepared(FEATURE, otherwise=lambda *_, **__: None)
def mark(
    message: str | None = None,
    color: str | int | None = None,
    domain: str | None = None,
    category: str | int | None = None,
    payload: Any = None,
) -> None:
    """Show an instant in every profiler that listens; the arguments are those of `annotate`.

    Without a message its name is empty.
    """
    message = "" if message is None else message
    if not isinstance(message, str):
        raise TypeError(f'"message" must be a string: {message!r}')
    if dispatch.tracing():
        dispatch.hide(message)
        return
    region.check(color, domain, category, payload)
    if dispatch.recording:
        dispatch.mark(region.make(message, color, domain, category, payload))


def _scriptable(name: str) -> Any:
    """Return what TorchScript compiles in place of a function; torch calls this when it meets the function."""
    from ...base.compat import scripting  # imports torch

    return getattr(scripting, name)


for _function in (annotate, mark):  # by an attribute, which costs a call nothing
    vars(_function)["__prepare_scriptable__"] = functools.partial(_scriptable, _function.__name__)
