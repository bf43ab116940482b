"""A region: a named stretch of code, with how a profiler should show it."""

from __future__ import annotations

import operator
import unicodedata
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

DOMAIN = "instrument"
BACKWARD = "backward"  # shown by this library, unless the program shows a region of this name around it
OPAQUE = 0xFF000000

# The names that nvtx knows itself. It gives them no alpha, unlike the names that it looks up in matplotlib.
NVTX_COLORS = ("blue", "cyan", "darkgreen", "green", "orange", "purple", "rapids", "red", "white", "yellow")

# These, and the rest of the basic web colors.
COLORS = {
    "aqua": 0x00FFFF,
    "black": 0x000000,
    "blue": 0x0000FF,
    "cyan": 0x00FFFF,
    "darkgreen": 0x006400,
    "fuchsia": 0xFF00FF,
    "gray": 0x808080,
    "green": 0x008000,
    "grey": 0x808080,
    "lime": 0x00FF00,
    "magenta": 0xFF00FF,
    "maroon": 0x800000,
    "navy": 0x000080,
    "olive": 0x808000,
    "orange": 0xFFA500,
    "purple": 0x800080,
    "rapids": 0x7400FF,
    "red": 0xFF0000,
    "silver": 0xC0C0C0,
    "teal": 0x008080,
    "white": 0xFFFFFF,
    "yellow": 0xFFFF00,
}

# Muted and distinct, so that neighbors differ on a timeline; a region without a color gets one from its name.
PALETTE = (
    0x4E79A7, 0xF28E2B, 0xE15759, 0x76B7B2, 0x59A14F, 0xEDC948,
    0xB07AA1, 0xFF9DA7, 0x9C755F, 0x86BCB6, 0xD37295, 0x8CD17D,
)  # fmt: skip


class Region:
    """A named stretch of code. Emitters keep prepared data in ``prepared``, each under its own name.

    ``arguments`` are lists of integers, which torch.profiler shows as inputs if it records shapes.

    ``plain`` is the name for torch.profiler: printable ASCII without quotes and backslashes. It writes
    "unknown" for any name with other characters, and quotes unescaped, which makes the whole trace unreadable.
    """

    __slots__ = ("arguments", "category", "color", "domain", "is_backward", "name", "payload", "plain", "prepared")

    def __init__(
        self,
        name: str,
        color: int,
        domain: str = DOMAIN,
        category: str | int | None = None,
        payload: Any = None,
        arguments: Sequence[Sequence[int]] = (),
    ) -> None:
        name, domain = _utf8(name), _utf8(domain)
        self.name = name
        self.is_backward = name == BACKWARD
        self.plain = plain(name)
        self.color = color
        self.domain = domain
        self.category = _utf8(category) if isinstance(category, str) else category
        self.payload = payload
        self.arguments = [list(argument) or () for argument in arguments]  # torch takes no empty list
        self.prepared: dict[str, Any] = {}


def _utf8(text: str) -> str:
    """Return ``text`` without lone surrogates, which file names may hold and no profiler accepts."""
    return text.encode("utf-8", "replace").decode("utf-8")


_REPLACED = {'"': "'", "\\": "/", "\t": " ", "\n": " ", "\r": " "}


def plain(name: str) -> str:
    """Return ``name`` in printable ASCII without quotes and backslashes: torch.profiler escapes nothing."""
    if name.isascii() and name.isprintable() and '"' not in name and "\\" not in name:
        return name
    letters = [c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c)]
    replaced = (_REPLACED.get(c, c) for c in letters)
    return "".join(c if c.isascii() and c.isprintable() else f"U+{ord(c):04X}" for c in replaced)


def check(color: object, domain: object, category: object, payload: object) -> None:
    """Raise ``TypeError`` or ``ValueError``, naming the argument, for a value that `make` does not accept."""
    if color is not None:
        argb(color)
    if domain is not None and not isinstance(domain, str):
        raise TypeError(f'"domain" must be a string: {domain!r}')
    if category is not None and (isinstance(category, bool) or not isinstance(category, (str, int))):
        raise TypeError(f'"category" must be a string or an integer: {category!r}')
    if payload is not None and (isinstance(payload, str) or not hasattr(payload, "__iter__")):
        number(payload)


def number(payload: Any) -> int | float:
    """Return ``payload``, a number of Python or numpy, as an int or a float.

    Raises:
        TypeError: it is not a number.
    """
    if hasattr(payload, "__index__"):
        return operator.index(payload)
    if hasattr(payload, "__float__"):
        return float(payload)
    raise TypeError(f'"payload" must be a number, or numbers in a list, tuple, range, bytes or array: {payload!r}')


def argb(color: object) -> int:
    """Return ``color`` as 0xAARRGGBB; an integer is taken as it is.

    Args:
        color: an integer, "#RRGGBB", "#AARRGGBB", one of `COLORS`, or any color matplotlib knows if it is
            installed. Alpha is 255 by default, and 0 for `NVTX_COLORS`, as with nvtx.

    Raises:
        TypeError: neither a string nor an integer.
        ValueError: an unknown color, or an integer outside 0 .. 0xFFFFFFFF.
    """
    if isinstance(color, bool) or not isinstance(color, (int, str)):
        raise TypeError(f'"color" must be a string or an integer: {color!r}')
    if isinstance(color, int):
        if not 0 <= color <= 0xFFFFFFFF:
            raise ValueError(f'"color" must be within 0 .. 0xFFFFFFFF: {color!r}')
        return color
    rgb = COLORS.get(color.lower())
    if rgb is not None:
        return rgb if color in NVTX_COLORS else OPAQUE | rgb
    digits = color[1:]
    if color.startswith("#") and len(digits) in (6, 8) and not set(digits) - set("0123456789abcdefABCDEF"):
        return int(digits, 16) | (OPAQUE if len(digits) == 6 else 0)
    try:
        from matplotlib.colors import to_rgb

        red, green, blue = (round(255 * part) for part in to_rgb(color))
    except (ImportError, ValueError):
        raise ValueError(
            f'"color" must be an integer, "#RRGGBB", one of {", ".join(COLORS)}, '
            f"or, with matplotlib installed, a color it knows: {color!r}"
        ) from None
    return OPAQUE | int(red) << 16 | int(green) << 8 | int(blue)


def by_name(name: str) -> int:
    """Return the default color for a region's name; every process gives a name the same color."""
    return OPAQUE | PALETTE[zlib.crc32(name.encode("utf-8", "replace")) % len(PALETTE)]


def make(
    name: str, color: str | int | None, domain: str | None, category: str | int | None, payload: Any
) -> Region:
    """Return the region with these attributes; the same object for the same attributes."""
    if payload is None:
        return _make(name, color, domain, category)
    region = _make.__wrapped__(name, color, domain, category)
    region.payload = payload if hasattr(payload, "__iter__") else number(payload)
    return region


# Bounded, since names made in a loop (f"batch {i}") would otherwise be kept forever.
@lru_cache(maxsize=4096, typed=True)
def _make(name: str, color: str | int | None, domain: str | None, category: str | int | None) -> Region:
    return Region(
        name, by_name(name) if color is None else argb(color), DOMAIN if domain is None else domain, category
    )
