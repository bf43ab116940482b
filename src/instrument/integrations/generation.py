"""`annotate_generation`: regions for ``generate()`` of a Transformers model, "prefill" and each "decode"."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

import instrument

from ..base.guard import guard
from ..base.patch import Patch, apply, undo
from ..record.modules.service import Handle, PatchService, contain_request

FEATURE = "naming a part of generate"


class GenerateCall:
    """One call of ``generate``, whose open region is the part that runs now."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.prefilling = False  # in _prefill(), maybe in chunks
        self._prefilled = False
        self._continuation_checked = False  # whether to continue, since the prefill
        self._region: Any = None

    def prefill(self) -> None:
        """Open "prefill": the prompt goes through the model, and the loop over tokens follows."""
        self.prefilling, self._continuation_checked = True, False
        self._begin("prefill")

    def forward(self) -> None:
        """Open a part: the inputs of the model's next forward are prepared."""
        if not self.prefilling:
            self._begin("decode" if self._prefilled else "prefill")

    def check(self) -> None:
        """Close the part: the loop checks whether to continue, because a token was chosen.

        The first check after the prefill comes before a token is chosen, and closes nothing.
        """
        if self._continuation_checked:
            self.end()
        self._continuation_checked = True

    def end(self) -> None:
        """Close the open region."""
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
    """A request to annotate a model; it does not keep the model alive."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self._name = type(model).__name__

    def __str__(self) -> str:
        return f"{self._name}.generate"


class Generation(PatchService[GenerationAnnotation]):
    """Patches the classes that define the generation methods of models; other models are unaffected.

    The methods are looked up at each call, and none is part of the code that is compiled for a static cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self._patched: set[tuple[type, str]] = set()
        self._patches: list[Patch] = []
        self._running = threading.local()
        around: dict[str, Callable[..., Any]] = {
            "generate": self._generate,
            "_prefill": self._prefill,
            "prepare_inputs_for_generation": functools.partial(self._notify, GenerateCall.forward),
            "_has_unfinished_sequences": functools.partial(self._notify, GenerateCall.check),
        }
        self._makers = {name: functools.partial(_following, call) for name, call in around.items()}

    def apply(self, on: bool) -> None:
        """Patch the methods of the requested models, and restore those that are no longer needed."""
        requests = self.requests if on else ()
        wanted = {place for request in requests for place in self._methods_to_patch(request.model())}
        if wanted == self._patched and (wanted or not self._patches):
            return
        self._patched = set()  # until all patches are applied
        undo(self._patches)
        apply((Patch(owner, name, self._makers[name]) for owner, name in wanted), self._patches)
        self._patched = wanted

    def _methods_to_patch(self, model: nn.Module | None) -> set[tuple[type, str]]:
        """Return the classes that define the model's methods; some versions lack some of the methods."""
        kinds = () if model is None else type(model).__mro__
        places = {(next((kind for kind in kinds if name in vars(kind)), None), name) for name in self._makers}
        return {(kind, name) for kind, name in places if kind is not None}

    def _calls(self) -> list[GenerateCall]:
        """Return the running calls of this thread, the innermost last."""
        calls: list[GenerateCall] = vars(self._running).setdefault("calls", [])
        return calls

    def _call(self, model: Any) -> GenerateCall | None:
        calls = self._calls()
        return calls[-1] if calls and calls[-1].model is model else None

    def _generate(self, original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
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

    def _prefill(self, original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = self._call(model)
        if call is None:
            return original(model, *args, **kwargs)
        call.prefill()
        try:
            return original(model, *args, **kwargs)
        finally:
            call.prefilling = False

    def _notify(
        self,
        event: Callable[[GenerateCall], None],
        original: Callable[..., Any],
        model: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        call = self._call(model)
        if call is not None:
            event(call)
        return original(model, *args, **kwargs)


def _following(around: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(original)(guard.around(FEATURE, original, around))


generation = Generation()


@contain_request
def annotate_generation(model: nn.Module) -> Handle:
    """Make ``model.generate()`` the region "generate", with "prefill" and one "decode" for each token inside.

    "prefill" ends when the first token is chosen; each "decode" lasts from the preparation of its forward until
    its token is chosen. In assisted generation a decode checks several drafted tokens. The tokens are unchanged,
    and methods are patched only while a profiler records or a tool is attached.

    Args:
        model: a Transformers model, wrapped (DDP, PEFT) or not. It is not kept alive.

    Returns:
        A handle with ``remove()``, which is also a context manager.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` has no ``generate``.

    Example:
        >>> with annotate_generation(model):
        ...     model.generate(**inputs)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f'"model" must be a torch.nn.Module: {model!r:.200}')
    # PEFT's model class calls generate() of the wrapped model, whose class it does not inherit.
    generating = [module for module in model.modules() if hasattr(type(module), "prepare_inputs_for_generation")]
    if not generating:
        raise ValueError(f'"model" must have generate(), as language models do: {type(model).__name__}')
    return generation.add(GenerationAnnotation(generating[0]))
