"""The option with which a script takes its batch, in the arguments of the script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class BatchOption(NamedTuple):
    """The option with which a script takes its batch: ``batch-size`` for ``--batch-size``, or ``batch_size=``."""

    name: str

    def value(self, arguments: Sequence[str]) -> int | None:
        """Return the value in the arguments of the script; None if they lack the option.

        Raises:
            ValueError: it is not a whole number of at least 1.
        """
        at = self._place(arguments)
        if at is None:
            return None
        before, equals, value = arguments[at].rpartition("=")
        given = value if equals else (arguments[at + 1] if at + 1 < len(arguments) else "")
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(
                f'"batch" must name an option of the script whose value is a whole number of at least 1: '
                f"{before or self._key} has {given!r}"
            )
        return int(given)

    def given(self, arguments: Sequence[str], batch: int) -> list[str]:
        """Return the arguments with another batch."""
        at, changed = self._place(arguments), list(arguments)
        if at is None:
            return [*changed, *([f"{self._key}={batch}"] if self.name.endswith("=") else [self._key, str(batch)])]
        if "=" in changed[at]:
            changed[at] = f"{self._key}={batch}"
        else:
            changed[at + 1] = str(batch)
        return changed

    @property
    def _key(self) -> str:
        return (
            f"{'' if self.name.startswith('-') or self.name.endswith('=') else '--'}{self.name.removesuffix('=')}"
        )

    def _place(self, arguments: Sequence[str]) -> int | None:
        """Return where the option is; the last one counts, as in argparse."""
        named = [at for at, word in enumerate(arguments) if word == self._key or word.startswith(f"{self._key}=")]
        return named[-1] if named else None
