"""`annotate_generation`: ``generate()`` of a Transformers model as regions, "prefill" and each "decode" apart."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

import instrument

from ..guard import guard
from ..modules.service import Handle, Service, served
from ..patch import Patch, apply, undo

FEATURE = "naming a part of generate"


class GenerateCall:
    """One call of ``generate``: what of it runs now is the open region."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.prefilling = False  # by a method of its own, maybe in chunks
        self._prefilled = False
        self._checked = False  # whether to go on, since the prefill
        self._region: Any = None

    def prefill(self) -> None:
        """The prompt is about to go through the model, and the loop over tokens follows."""
        self.prefilling, self._checked = True, False
        self._begin("prefill")

    def forward(self) -> None:
        """Inputs of the model are prepared."""
        if not self.prefilling:
            self._begin("decode" if self._prefilled else "prefill")

    def check(self) -> None:
        """The loop asks whether to go on: a token was chosen, but for the first time after the prefill."""
        if self._checked:
            self.end()
        self._checked = True

    def end(self) -> None:
        """Close what is open."""
        with guard.contained(FEATURE):
            region, self._region = self._region, None
            if region is not None:
                region.__exit__(None, None, None)

    def _begin(self, name: str) -> None:
        self.end()
        self._prefilled = True
        with guard.contained(FEATURE):
            region = instrument.annotate(name)
            region.__enter__()
            self._region = region


class GenerationAnnotation:
    """The model that somebody wants annotated, which is not kept alive."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self._name = type(model).__name__

    def __str__(self) -> str:
        return f"{self._name}.generate"


class Generation(Service[GenerationAnnotation]):
    """Patches the classes that define what models use to generate, for those models alone.

    The methods are found at each call, and none is part of what is compiled for a static cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self._patched: set[tuple[type, str]] = set()
        self._patches: list[Patch] = []
        self._running = threading.local()

    def apply(self, on: bool) -> None:
        """Patch what the models use; put back what nobody needs."""
        wanted = {place for request in self.requests for place in self._places(request.model())} if on else set()
        if wanted == self._patched and (wanted or not self._patches):
            return
        self._patched = set()  # until it is done
        undo(self._patches)
        apply((Patch(owner, name, self._makers[name]) for owner, name in wanted), self._patches)
        self._patched = wanted

    def _places(self, model: nn.Module | None) -> set[tuple[type, str]]:
        """Return the classes in which the model's methods are defined; versions have not all of them."""
        kinds = () if model is None else type(model).__mro__
        found = {(next((kind for kind in kinds if name in vars(kind)), None), name) for name in self._makers}
        return {(kind, name) for kind, name in found if kind is not None}

    @property
    def _makers(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "generate": self._generate,
            "_prefill": self._prefill,
            "prepare_inputs_for_generation": functools.partial(self._tells, GenerateCall.forward),
            "_has_unfinished_sequences": functools.partial(self._tells, GenerateCall.check),
        }

    def _calls(self) -> list[GenerateCall]:
        """Return the calls that run on this thread, the innermost last."""
        calls: list[GenerateCall] = vars(self._running).setdefault("calls", [])
        return calls

    def _call(self, model: Any) -> GenerateCall | None:
        calls = self._calls()
        return calls[-1] if calls and calls[-1].model is model else None

    def _generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def following(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
            if all(request.model() is not model for request in self.requests):
                return original(model, *args, **kwargs)
            calls, call = self._calls(), GenerateCall(model)
            calls.append(call)
            try:
                with instrument.annotate("generate"):
                    try:
                        return original(model, *args, **kwargs)
                    finally:
                        call.end()
            finally:
                calls.remove(call)

        return functools.wraps(original)(guard.around(FEATURE, original, following))

    def _prefill(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def following(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model)
            if call is None:
                return original(model, *args, **kwargs)
            call.prefill()
            try:
                return original(model, *args, **kwargs)
            finally:
                call.prefilling = False

        return functools.wraps(original)(guard.around(FEATURE, original, following))

    def _tells(self, event: Callable[[GenerateCall], None], original: Callable[..., Any]) -> Callable[..., Any]:
        def following(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model)
            if call is not None:
                event(call)
            return original(model, *args, **kwargs)

        return functools.wraps(original)(guard.around(FEATURE, original, following))


generation = Generation()


@served
def annotate_generation(model: nn.Module) -> Handle[GenerationAnnotation]:
    """Make ``model.generate()`` the region "generate", with "prefill" and one "decode" a token inside.

    "prefill" lasts until the first token is chosen, each "decode" from the preparation of its forward until its
    token is chosen; in assisted generation a decode checks several drafted tokens. The tokens stay as they are.
    Nothing is patched but while a profiler records or a tool is attached.

    Args:
        model: a Transformers model, wrapped (DDP, PEFT) or not. It is not kept alive.

    Returns:
        A handle with ``remove()``, which is a context manager as well.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: it has no ``generate``.

    Example:
        >>> with annotate_generation(model):
        ...     model.generate(**inputs)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f'"model" must be a torch.nn.Module: {model!r:.200}')
    # PEFT's own class of model generates by that of the model inside, of which it is no subclass.
    found = [module for module in model.modules() if hasattr(type(module), "prepare_inputs_for_generation")]
    if not found:
        raise ValueError(f'"model" must have generate(), as language models do: {type(model).__name__}')
    return generation.add(GenerationAnnotation(found[0]))
