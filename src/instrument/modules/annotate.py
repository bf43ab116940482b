"""`annotate_modules`: regions for the forward and backward of the modules of a model."""

from __future__ import annotations

from torch import nn

from .installer import AnnotatedModel, installer
from .layout import Namer
from .selection import Rules, Selection
from .service import Handle, contain_request


@contain_request
def annotate_modules(
    model: nn.Module,
    depth: int | None = None,
    include: Rules | None = None,
    exclude: Rules | None = None,
    backward: bool = True,
    *,
    names: str = "path",
    skip_containers: bool = False,
    shapes: bool = False,
    modes: bool = True,
) -> Handle:
    """Annotate each module of ``model``, forward and backward, in every active profiler.

    A region has the module's qualified name (``encoder.layers.3.self_attn``); the region of its backward has the
    same name with ``(backward)``. The model itself is named after its class and, if several models have the same
    class, by the variable that holds it: ``Sequential[actor]``. The modules have hooks only while a profiler
    records or a tool is attached; the model is inspected again each time. Arguments, outputs and gradients do not
    change.

    A compiled or scripted module is one region without regions inside.

    Args:
        model: any module, wrapped (DDP, FSDP, torch.compile) or not. The library does not keep it alive.
        depth: how many levels below the model; 0 is only the model, None is all. Modules without a forward,
            such as `torch.nn.ModuleList`, and wrappers that hold only the model, such as DDP, do not count.
        include: which modules: a pattern of qualified names as in a shell (``"encoder.layers.*"``, where
            ``*`` also matches dots), a compiled regular expression (matched by ``search``), a class, a
            function of name and module, or a sequence of these, one of which must match.
        exclude: which modules to leave out; the modules inside them stay.
        backward: whether to annotate backward as well: from the first gradient of the module's outputs until the
            gradients of its inputs, or of its parameters if no input needs one, are computed.
        names: "path", "class" (``LlamaAttention``) or "both" (``layers.3.self_attn: LlamaAttention``).
        skip_containers: whether to leave out `torch.nn.Sequential`, `ModuleList` and `ModuleDict`; modules inside
            keep their names.
        shapes: whether to show the shapes of the inputs: in NVTX the first one as the payload; in torch.profiler
            all of them, as inputs, if it records shapes.
        modes: whether to add ``(eval)`` to the name of a forward in evaluation mode.

    Returns:
        A handle with ``remove()``; it is a context manager as well. A module that another handle annotates is left
        to that handle until it is removed.

    Raises:
        TypeError: ``model`` is not a module, or a rule is of another kind.
        ValueError: a rule matches no module, or another argument is not accepted.

    Example:
        >>> annotate_modules(model, include="layers.*", exclude=torch.nn.Dropout)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f'"model" must be a torch.nn.Module: {model!r:.200}')
    selection = Selection(depth, include, exclude, skip_containers, names)
    selection.check(model)
    return installer.add(AnnotatedModel(model, Namer(selection, backward, modes), shapes))
