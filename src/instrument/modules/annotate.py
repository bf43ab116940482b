"""`annotate_modules`: the modules of a model become regions, forward and backward."""

from __future__ import annotations

from torch import nn

from .installer import Fitter, installer
from .plan import Namer
from .selection import Rules, Selection
from .service import Handle, served


@served
def annotate_modules(
    model: nn.Module,
    depth: int | None = None,
    include: Rules | None = None,
    exclude: Rules | None = None,
    backward: bool = True,
    *,
    names: str = "path",
    fold: bool = False,
    shapes: bool = False,
    modes: bool = True,
) -> Handle[Fitter]:
    """Make each module of ``model`` a region, forward and backward, in every profiler that listens.

    A region has the module's qualified name (``encoder.layers.3.self_attn``; the model itself goes by its
    class, and by the variable that holds it where several models are of one class: ``Sequential[actor]``), that
    of its backward the same with ``(backward)``. Hooks are on the modules while a profiler
    records or a tool is attached, and only then; the model is looked at anew each time. Arguments, outputs and
    gradients stay as they are.

    Of what torch.compile or TorchScript made, the call is a region, with nothing inside.

    Args:
        model: any module, wrapped (DDP, FSDP, torch.compile) or not. It is not kept alive.
        depth: how many levels below the model; 0 is the model alone, None is all.
        include: which modules: a pattern of qualified names as in a shell (``"encoder.layers.*"``, where
            ``*`` stands for dots as well), a compiled regular expression that is searched for in them, a class,
            a function of name and module, or several of these, one of which must hold.
        exclude: which modules not; the modules inside them stay.
        backward: regions of the backward as well: from the first gradient that reaches the module's outputs
            until those of its inputs, or of its parameters where no input needs one, are done.
        names: "path", "class" (``LlamaAttention``) or "both" (``layers.3.self_attn: LlamaAttention``).
        fold: no regions for `torch.nn.Sequential`, `ModuleList` and `ModuleDict`; what is inside keeps its name.
        shapes: show the shapes of the inputs, in NVTX those of the first as the payload, in torch.profiler all
            of them as inputs if it records shapes.
        modes: a forward in evaluation mode, as after ``model.eval()``, is a region with ``(eval)`` after its name.

    Returns:
        A handle with ``remove()``, which is a context manager as well. Modules that another handle covers are
        left to that one until it is removed.

    Raises:
        TypeError: ``model`` is no module, or a rule is of another kind.
        ValueError: a rule that matches no module, or one of the other arguments.

    Example:
        >>> annotate_modules(model, include="layers.*", exclude=torch.nn.Dropout)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f'"model" must be a torch.nn.Module: {model!r:.200}')
    selection = Selection(depth, include, exclude, fold, names)
    selection.check(model)
    return installer.add(Fitter(model, Namer(selection, backward, modes), shapes))
