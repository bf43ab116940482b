"""Finds where an operator is called: pass, region, module and the user's line.

A walk over all frames up to the user's line would take most of the time of a run. The walk ends at the call of the
innermost module, which remembers what it found outside. An operator of the backward pass has the place of its
forward operator, by the number that autograd gives to the node between both.
"""

from __future__ import annotations

import functools
import os
import weakref
from array import array
from collections.abc import Callable, Iterator
from itertools import chain, count
from types import CodeType, FrameType
from typing import Any

import torch

from ...base.compat import autograd
from ...base.findings import Site
from ...base.patch import Patch, leave_no_frame
from ...explain.waits import sites
from .calls import Phase, Place

_MODULE, _UPDATE = -1, -2  # owners of code besides those of `sites`
_UPDATING = tuple(
    f"{os.sep}torch{os.sep}{path.replace('/', os.sep)}"
    for path in ("optim/", "nn/utils/clip_grad.py", "amp/grad_scaler.py")
)
_SCALES_LOSS = ("scale", "apply_scale", "_lazy_init_scale_growth_tracker")  # functions of the last one
_Line = tuple[int, int]  # of a code object and an instruction
_NO_LINE: _Line = (0, 0)
UNKNOWN, OUTSIDE = -1, -2


Lines = tuple[_Line, _Line, bool]
"""The lines of a call: the user's, the innermost one of a library, and whether an optimizer makes the call."""


class _ModuleCall:
    """A running call of a module; ``outside`` are the lines of the call itself, once they are known."""

    __slots__ = ("in_backward", "names", "outside", "path")

    def __init__(self, path: str, in_backward: bool, outside: Lines | None = None) -> None:
        self.path = path
        self.names: tuple[str, ...] = ()
        self.in_backward = in_backward
        self.outside = outside


class ThreadPlaces:
    """What is known of one thread.

    Attributes:
        modules: the running calls of modules, outermost first.
        creates_graph: whether the running backward pass creates a graph itself.
        in_call: the index of the place of the running call of a torch function; `UNKNOWN` if it has made no
            operator yet, `OUTSIDE` outside such calls.
        last_backward: the index of the place of the previous operator of a backward pass; -1 before the first.
        compiled: whether a graph of torch.compile runs.
    """

    def __init__(self) -> None:
        self.modules: list[_ModuleCall] = []
        self.creates_graph = False
        self.last_backward = -1
        self.in_call = OUTSIDE
        self.compiled = False
        self.next_number = 0  # of the autograd node after the last one in `_made`
        self._first = 0  # the number of the autograd node that the first of `_made` is about
        self._made = array("i")  # for each node of this thread, the index of the place that made it

    def made_by(self, node: Any) -> int:
        """Return the index of the place that made an autograd node; -1 if it is not known."""
        offset = node._sequence_nr() - self._first
        return self._made[offset] if 0 <= offset < len(self._made) else -1

    def note_nodes(self, next_number: int, index: int) -> None:
        """Note that the nodes that this thread made since the last operator belong to the one at ``index``.

        Torch makes the node of an operator before it runs it. Nodes that it made before that belong to the
        previous operator.
        """
        made = self._made
        if not made:
            self._first = max(next_number - 1, 0)
        missing = next_number - self._first - len(made)
        made.extend([made[-1] if made else index] * (missing - 1))
        made.append(index)
        self.next_number = next_number


class Places:
    """The places of one run.

    Args:
        path: returns the names of the regions that are open on this thread.
        on_model: called with each module and its path before its first call, unless a module around it was called
            before.
        on_module: called at each call of a module outside the backward pass, with the names of those that run,
            each relative to the one around it.

    Attributes:
        places: the distinct places.
    """

    def __init__(
        self,
        path: Callable[[], tuple[str, ...]],
        on_model: Callable[[Any, str], None],
        on_module: Callable[[tuple[str, ...]], None],
    ) -> None:
        self.places: list[Place] = []
        self._on_module = on_module
        self._path = path
        self._names = _ModuleNames(on_model)
        self._codes = _Codes()
        self._index_of: dict[Place, int] = {}
        self._index_by_key: dict[tuple[Any, ...], int] = {}
        self._lines_of: dict[int, Lines] = {}
        self._backward_of: dict[int, int] = {}
        self._node: Callable[[], Any]
        self._next_number: Callable[[], int]
        self._node, self._next_number = autograd.node_functions() or (lambda: None, lambda: 0)

    def find(self, thread: ThreadPlaces, frame: FrameType | None) -> int:
        """Return the index of the place of an operator that ``frame`` calls on ``thread`` now."""
        node = self._node()
        if node is None:
            index = thread.in_call
            if index < 0:
                index = self._walk(thread, frame, "forward")
                if thread.in_call == UNKNOWN:
                    thread.in_call = index
        elif (thread.modules and thread.modules[-1].in_backward) or (
            not thread.creates_graph and torch.is_grad_enabled()
        ):
            index = self._walk(thread, frame, "recomputed")
        else:
            forward = thread.made_by(node)
            index = self._backward_of.get(forward, -1)
            if index < 0:
                index = self._add_backward(thread, forward)
            thread.last_backward = index
            if not thread.creates_graph:
                return index  # makes no nodes
        number = self._next_number()
        if number > thread.next_number:
            thread.note_nodes(number, index)
        return index

    def _add_backward(self, thread: ThreadPlaces, forward: int) -> int:
        """Return the place of an operator in an autograd node; gradients are added at that of the previous one."""
        if forward < 0:
            last = thread.last_backward
            return last if last >= 0 else self._add(Place("backward", (), "", None, None))
        index = self._backward_of[forward] = self._add(self.places[forward]._replace(phase="backward"))
        return index

    def _walk(self, thread: ThreadPlaces, frame: FrameType | None, phase: Phase) -> int:
        lines = site, via, updates = self._codes.lines(thread.modules, frame)
        module = thread.modules[-1].path if thread.modules else ""
        if updates and not module and phase == "forward":
            phase = "optimizer"
        key = phase, self._path(), module, lines, thread.compiled
        index = self._index_by_key.get(key)
        if index is None:
            place = Place(phase, key[1], module, self._codes.site(site), self._codes.site(via), thread.compiled)
            index = self._index_by_key[key] = self._add(place)
            self._lines_of.setdefault(index, lines)
        return index

    def _add(self, place: Place) -> int:
        index = self._index_of.get(place)
        if index is None:
            index = self._index_of[place] = len(self.places)
            self.places.append(place)
        return index

    def begin_module(self, thread: ThreadPlaces, module: Any) -> None:
        """Note that ``thread`` calls ``module``."""
        outer = thread.modules[-1] if thread.modules else None
        path = self._names.path(module, outer.path if outer is not None else "")
        node = self._node()
        if node is None or (outer is not None and outer.in_backward):
            call = _ModuleCall(path, outer is not None and outer.in_backward)
            thread.modules.append(call)
            if not call.in_backward:
                name = path if outer is None else path.removeprefix(f"{outer.path}.")
                call.names = (*outer.names, name) if outer is not None else (name,)
                self._on_module(call.names)
            return
        forward = thread.made_by(node)  # the call is the one that made this node, once more
        thread.modules.append(_ModuleCall(path, True, self._lines_of.get(forward)))


class _Codes:
    """The code that frames run: whose it is, and its lines."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}
        self._codes: dict[int, CodeType] = {}  # kept alive, as their ids are keys
        self._updates: dict[_Line, bool] = {}
        self._with_closure: set[int] = set()  # ids of code with an argument of this name
        self._sites: dict[_Line, Site] = {}

    def lines(self, modules: list[_ModuleCall], frame: FrameType | None) -> Lines:
        """Return the lines of what ``frame`` calls, inside the running calls of ``modules``."""
        owners, depth = self._owners, len(modules)
        site = via = _NO_LINE
        updates: bool | None = None  # until a frame decides
        inner: FrameType | None = None
        passed: list[tuple[_ModuleCall, _Line]] = []
        while frame is not None:
            code = frame.f_code
            owner = owners.get(id(code))
            if owner is None:
                owner = self._owner(code)
            if owner == sites.USER:
                site = id(code), frame.f_lasti
                updates = self._is_update(site, frame, inner) if updates is None else updates
                break
            if owner == _MODULE and depth:
                depth -= 1
                outside = modules[depth].outside
                if outside is not None:
                    site, outer, updates = outside
                    via = via if via[0] else outer
                    break
                passed.append((modules[depth], via))
                via = _NO_LINE
            elif owner in (sites.LIBRARY, _UPDATE):
                updates = self._decision(owner, frame, inner) if updates is None else updates
                via = via if via[0] else (id(code), frame.f_lasti)
            inner, frame = frame, frame.f_back
        for call, line in reversed(passed):
            call.outside = site, via, bool(updates)
            via = line if line[0] else via
        return site, via, bool(updates)

    def _owner(self, code: CodeType) -> int:
        self._codes[id(code)] = code
        owner = sites.owner_of(code)
        if code.co_name in _CALLS:
            owner = _MODULE
        elif any(part in code.co_filename for part in _UPDATING) and code.co_name not in _SCALES_LOSS:
            owner = _UPDATE
        if "closure" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            self._with_closure.add(id(code))
        self._owners[id(code)] = owner
        return owner

    def _is_update(self, line: _Line, frame: FrameType, inner: FrameType | None) -> bool:
        """Return whether an optimizer of the program's own has this line, at which ``frame`` calls ``inner``."""
        known = self._updates.get(line)
        if known is None:
            outer: FrameType | None = frame
            while outer is not None and known is None:
                known = self._decision(self._owner(outer.f_code), outer, inner)
                inner, outer = outer, outer.f_back
            known = self._updates[line] = bool(known)
        return known

    def _decision(self, owner: int, frame: FrameType, inner: FrameType | None) -> bool | None:
        """Return whether ``frame`` makes what it calls a part of an update; None if that depends on its callers.

        What an optimizer calls as its closure is none.
        """
        closure = frame.f_locals.get("closure") if id(frame.f_code) in self._with_closure else None
        if closure is not None and inner is not None and _code_of(closure) is inner.f_code:
            return False
        return True if owner == _UPDATE else None

    def site(self, line: _Line) -> Site | None:
        """Return a line as the user sees it."""
        code = self._codes.get(line[0])
        if code is None:
            return None
        site = self._sites.get(line)
        if site is None:
            number = next((row for first, end, row in code.co_lines() if first <= line[1] < end), None)
            site = self._sites[line] = sites.site_in(code, number or code.co_firstlineno)
        return site


def _code_of(function: Any) -> Any:
    """Return the code that a call of ``function`` runs; None if it is not Python's."""
    while isinstance(function, functools.partial):
        function = function.func
    method = getattr(function, "__func__", function)
    return getattr(method, "__code__", None) or getattr(type(function).__call__, "__code__", None)


class _ModuleNames:
    """The paths of modules: from the outermost one that the program calls, which has the name of its class.

    Models of one class have numbers, such as "Net" and "Net_2", unless they hold no parameters, as loss functions.
    """

    def __init__(self, on_model: Callable[[Any, str], None]) -> None:
        self._on_model = on_model
        self._roots: dict[str, weakref.ref[Any]] = {}
        self._known: dict[int, tuple[weakref.ref[Any], str]] = {}

    def path(self, module: Any, outer: str) -> str:
        """Return the path of ``module``, which is called inside the module with the path ``outer``."""
        known = self._known.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        name = type(module).__name__
        path = self._root(module, f"{outer}.{name}" if outer else name)
        self._on_model(module, path)
        for inner, held in module.named_modules():
            if not outer or id(held) not in self._known:
                self._known[id(held)] = weakref.ref(held), f"{path}.{inner}" if inner else path
        return path

    def _root(self, module: Any, name: str) -> str:
        """Return a name that no other living model has."""
        if next(module.parameters(), None) is None:
            return name
        numbered = (f"{name}_{number}" for number in count(2))
        path = next(
            each for each in chain((name,), numbered) if each not in self._roots or not self._roots[each]()
        )
        self._roots[path] = weakref.ref(module)
        return path


def patches(
    begin_module: Callable[[ThreadPlaces, Any], None], thread_places: Callable[[], ThreadPlaces | None]
) -> Iterator[Patch]:
    """Return what must be patched.

    Args:
        begin_module: called with the thread and the module before each call of a module.
        thread_places: returns what is known of the calling thread; None if it is not watched.
    """

    def make_call(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def instrumented_module_call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            thread = thread_places()
            if thread is None:
                return original(module, *args, **kwargs)
            depth = len(thread.modules)
            begin_module(thread, module)
            try:
                return original(module, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                del thread.modules[depth:]

        return instrumented_module_call

    def make_pass(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(outputs: Any, gradients: Any, keep: bool, creates_graph: bool, *args: Any, **kwargs: Any) -> Any:
            thread = thread_places()
            if thread is None:
                return original(outputs, gradients, keep, creates_graph, *args, **kwargs)
            before, thread.creates_graph = thread.creates_graph, creates_graph
            try:
                return original(outputs, gradients, keep, creates_graph, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                thread.creates_graph = before

        return run

    yield Patch(torch.nn.Module, "__call__", make_call)
    runner = autograd.backward_runner()
    if runner is not None:
        yield Patch(*runner, make_pass)


def call_in_module(thread: ThreadPlaces, name: str, run: Callable[[Any], Any], node: Any) -> Any:
    """Call ``run(node)`` as in the module with this path; it begins with "." inside the module that runs."""
    outer = thread.modules[-1] if thread.modules else None
    path = f"{outer.path}{name}" if outer is not None and name.startswith(".") else name.removeprefix(".")
    thread.modules.append(_ModuleCall(path, outer is not None and outer.in_backward))
    try:
        return run(node)
    finally:
        thread.modules.pop()


_CALLS = ("instrumented_module_call", "call_in_module")
