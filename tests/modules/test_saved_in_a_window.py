"""Models saved whole in a window give the same file as outside."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import instrument
from instrument.record.stepping.outermost_model import OutermostModel


class OwnState(nn.Module):
    """Returns its own dictionary as its state, as some modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


MODELS = {
    "linear": lambda: nn.Linear(2, 2),
    "lstm": lambda: nn.LSTM(2, 2),
    "inside": lambda: nn.Sequential(nn.GRU(2, 2)),
    "own state": OwnState,
}


@contextmanager
def window(model: nn.Module) -> Iterator[None]:
    with instrument.annotate_modules(model), torch.profiler.profile():
        yield


@contextmanager
def followed(model: nn.Module) -> Iterator[None]:
    follower = OutermostModel(lambda _: None, lambda _: None)
    follower.follow()
    try:
        model(torch.ones(1, 2))
        assert follower.model is model
        yield
    finally:
        follower.remove()


@pytest.mark.parametrize("during", [window, followed])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_same_file(make: object, during: object) -> None:
    """The pickle is equal byte by byte, and the model keeps its attributes."""
    model = make()  # type: ignore[operator]
    before = pickle.dumps(model)
    with during(model):  # type: ignore[operator]
        attributes = vars(model).copy()
        model(torch.ones(1, 2))
        assert before == pickle.dumps(model)
        assert attributes.keys() == vars(model).keys()
    assert before == pickle.dumps(model)
    assert "__getstate__" not in vars(type(model)) or type(model) is OwnState


def test_loads_with_weights_only() -> None:
    """`torch.load(weights_only=True)`, which refuses unknown functions, accepts the file."""
    model = nn.LSTM(2, 2)
    file = io.BytesIO()
    with window(model):
        torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.LSTM]):
        assert isinstance(torch.load(file, weights_only=True), nn.LSTM)
