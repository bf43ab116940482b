"""A layer: a module's place in a model, with its regions."""

from __future__ import annotations

from ..regions.region import Region

Shapes = tuple[tuple[int, ...], ...]
KEPT = 256  # shapes that a layer keeps a region for


class Layer:
    """What a module is called at one place in a model.

    Attributes:
        region: of its forward; None where only the calls of others need to know of its own.
        evaluation: of its forward while the module is in evaluation mode.
        backward: of its backward, None where there is none.
        alone: what stands for it where no call is around: it has a name that tells it from others of its class.
        parent: the layer it is called from, as far as the model's structure tells.
        owner: the first of the layers of its module, the one that the module's hooks know.
        twins: for an owner, all layers of a module that has several places; empty otherwise.
        seen: whether it was called since it was made.
    """

    __slots__ = (
        "_shaped",
        "alone",
        "backward",
        "evaluation",
        "name",
        "owner",
        "parent",
        "region",
        "seen",
        "twins",
    )

    def __init__(
        self,
        name: str,
        region: Region | None,
        evaluation: Region | None,
        backward: Region | None,
        parent: Layer | None,
    ) -> None:
        self.name = name
        self.region = region
        self.evaluation = evaluation
        self.backward = backward
        self.parent = parent
        self.alone: Layer | None = None
        self.owner = self
        self.twins: list[Layer] = []
        self.seen = False
        self._shaped: dict[tuple[str, Shapes], Region] = {}

    def shaped(self, region: Region, shapes: Shapes) -> Region:
        """Return ``region`` with the shapes of its inputs; NVTX shows those of the first as the payload."""
        known = self._shaped.get((region.name, shapes))
        if known is None:
            if len(self._shaped) >= KEPT:
                self._shaped.clear()
            known = Region(region.name, region.color, region.domain, region.category, shapes[0], shapes)
            self._shaped[region.name, shapes] = known
        return known
