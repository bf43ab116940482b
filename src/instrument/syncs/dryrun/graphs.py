"""`Graph`: runs a graph of torch.compile operator by operator, each at the user's line and in its module."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from ...base.compat.compiler import own_name
from ...base.findings import Site
from ...explain.waits import sites
from ..counting.places import call_in_module
from .state import RunState, as_cuda

Line = tuple[str, int, str]  # file, number, and name of the function
_LINE = re.compile(r'File "(.+)", line (\d+), in (.+)')
_SOURCE = re.compile(r"(self|[LG]\['\w+'\])\.?(.*)")


def stack_site(stack: Sequence[Line]) -> tuple[Site | None, Site | None]:
    """Return the user's line in a stack, outermost first, and the innermost line of a library below it."""
    via: Site | None = None
    for file, number, name in reversed(stack):
        owner = sites.code_owner(file)
        site = Site(file, number, own_name(name))
        if owner == sites.USER:
            return site, via
        if owner == sites.LIBRARY and via is None:
            via = site
    return None, via


class Graph(fx.Interpreter):
    """A graph that runs when it is called, in place of what a backend would compile.

    Args:
        module: the graph.
        state: the dry run.
    """

    def __init__(self, module: fx.GraphModule, state: RunState) -> None:
        super().__init__(module)
        self.extra_traceback = False  # of the program's errors
        self._state = state
        self._frames = {node: _frames(node.stack_trace) for node in module.graph.nodes}
        self._modules = {node: _module(node.meta.get("nn_module_stack")) for node in module.graph.nodes}

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        places = self._state.thread.places
        before, places.compiled = places.compiled, True
        try:
            return copy.copy(self).run(*args)
        finally:
            places.compiled = before

    def run_node(self, n: fx.Node) -> Any:
        """Run a node below frames that look like those of the lines which it comes from."""
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        run: Callable[[fx.Node], Any] = super().run_node
        for frame in self._frames[n]:
            run = _inside(frame, run)
        name = self._modules[n]
        return call_in_module(self._state.thread.places, name, run, n) if name else run(n)


def on_cpu(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with the CPU in place of GPUs, to be run where no function mode is on."""
    devices = [value for node in module.graph.nodes for value in (*node.args, *node.kwargs.values())]
    if not any(isinstance(value, torch.device) and as_cuda(value) for value in devices):
        return module
    made = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in made.graph.nodes:
        node.args, node.kwargs = tree_map_only(
            torch.device,
            lambda device: torch.device("cpu") if as_cuda(device) else device,
            (node.args, node.kwargs),
        )
    made.recompile()
    return made


def _inside(frame: Callable[..., Any], run: Callable[[fx.Node], Any]) -> Callable[[fx.Node], Any]:
    return lambda node: frame(run, node)


def _frames(trace: str | None) -> list[Callable[..., Any]]:
    """Return a function at each line of a traceback, innermost first."""
    lines = _LINE.findall(trace or "")
    return [_frame(file, int(number), own_name(name)) for file, number, name in reversed(lines)]


@lru_cache(maxsize=4096)
def _frame(file: str, number: int, name: str) -> Callable[..., Any]:
    """Return a function that calls its first argument with the second one, at this line."""
    code: Any = _call.__code__.replace(co_filename=file, co_firstlineno=number - 1, co_name=name)
    if hasattr(code, "co_qualname"):
        code = code.replace(co_qualname=name)
    return FunctionType(code, {})


def _call(run: Callable[[Any], Any], node: Any) -> Any:
    return run(node)  # on the line after the first, which `_frame` counts on


def _module(stack: Any) -> str:
    """Return the path of the innermost module of a node: from the outermost one, which has the name of its class.

    It begins with "." inside the module whose ``forward`` is compiled.
    """
    entries = list((stack or {}).values())
    match = _SOURCE.fullmatch(entries[-1][0]) if entries else None
    if match is None:
        return ""
    source, inner = match.groups()
    first, kind = entries[0]
    if first == source:
        return ".".join(filter(None, (getattr(kind, "__name__", str(kind)), inner)))
    return f".{inner}" if inner else ""
