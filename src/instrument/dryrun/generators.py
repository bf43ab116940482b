"""Random number generators of the pretended GPU, which are CPU generators under another name."""

from __future__ import annotations

from typing import Any

import torch

_PHILOX = 16  # bytes in the state of a real GPU's generator: seed and offset


class Generator(torch._C.Generator):
    """A CPU generator that reports a GPU as its device."""

    # `__new__` is C code, and takes the real device
    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._offset = 0

    def __new__(cls, index: int = 0) -> Generator:
        """Create the generator on the CPU."""
        made: Generator = super().__new__(cls)
        return made

    @property
    def device(self) -> Any:  # type: ignore[override]  # an attribute in torch's stubs, read-only in fact
        """The GPU that the generator pretends to be on."""
        return torch.device("cuda", self._index)

    def set_state(self, new_state: Any) -> Any:
        """Set a state from `get_state`; of a real GPU's state, use only the seed."""
        if new_state.numel() == _PHILOX:
            return self.manual_seed(int.from_bytes(bytes(new_state.numpy()[:8]), "little"))
        super().set_state(new_state)
        return self

    def get_offset(self) -> int:
        """Return what `set_offset` set; it changes nothing."""
        return self._offset

    def set_offset(self, offset: int) -> Any:
        """Store ``offset``, which CPU generators do not have."""
        self._offset = offset
        return self

    def clone_state(self) -> Any:
        """Return another generator in the same state."""
        other = Generator(self._index)
        return other.set_state(self.get_state())

    def graphsafe_get_state(self) -> Any:
        """Return the state for `graphsafe_set_state`."""
        return self.clone_state()

    def graphsafe_set_state(self, state: Any) -> Any:
        """Take the state of another generator."""
        return self.set_state(state.get_state())

    def __reduce__(self) -> Any:
        return _restored, (type(self), self._index, self.get_state())


class DefaultGenerator(Generator):
    """The default generator of a device: the CPU's, from which every operator here draws."""

    def get_state(self) -> Any:
        """Return the state of the CPU's generator."""
        return torch.default_generator.get_state()

    def set_state(self, new_state: Any) -> Any:
        """Set the state of the CPU's generator."""
        if new_state.numel() == _PHILOX:
            return super().set_state(new_state)
        torch.default_generator.set_state(new_state)
        return self

    def manual_seed(self, seed: int) -> Any:
        """Seed the CPU's generator."""
        torch.default_generator.manual_seed(seed)
        return self

    def seed(self) -> int:
        """Seed the CPU's generator at random; return the seed."""
        seed: int = torch.default_generator.seed()
        return seed

    def initial_seed(self) -> int:
        """Return the seed of the CPU's generator."""
        seed: int = torch.default_generator.initial_seed()
        return seed


def _restored(kind: type[Generator], index: int, state: Any) -> Any:
    made = kind(index)
    return made if kind is DefaultGenerator else made.set_state(state)
