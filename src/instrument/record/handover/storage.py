"""`keep` and `Storage`: how long the files of windows stay, and to which URL copies of them go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote, urlsplit

from ...base.units import integer, parse_duration, parse_size

MAX_TIMEOUT_S = 600  # the finishing process ends then, if the program has exited


@dataclass(frozen=True)
class Keep:
    """How long the files of windows stay, as `keep` returns it."""

    windows: int | None = None
    age: str | None = None
    total: str | None = None

    def __post_init__(self) -> None:
        if self.windows is not None:
            object.__setattr__(self, "windows", integer("windows", self.windows, least=1))
        if (self.windows, self.age_s, self.total_bytes) == (None, None, None):
            raise ValueError('"keep" needs one of windows, age and total, such as keep(windows=10)')

    @cached_property
    def age_s(self) -> float | None:
        """The age in seconds."""
        return None if self.age is None else parse_duration(self.age, "age")

    @cached_property
    def total_bytes(self) -> int | None:
        """The total size in bytes."""
        return None if self.total is None else parse_size(self.total, "total")


def keep(*, windows: int | None = None, age: str | None = None, total: str | None = None) -> Keep:
    """Return how long the files of windows stay, for `profile`; a window is deleted when it exceeds any limit.

    The newest window always stays, and so does each in whose folder a person puts a file named ``keep``.

    Args:
        windows: the number of windows that stay; None for all.
        age: the age up to which they stay, in s, m, h, d or w, such as "7d"; None for any.
        total: the size of all that stay, in B, kB, MB, GB or TB (powers of 1000; also k, M, G, T) or KiB, MiB, GiB
            or TiB (of 1024), such as "20GB"; None for any.

    Raises:
        TypeError, ValueError: a value that is not accepted, or none is given.

    Example:
        >>> profile("runs/bert", schedule="100-102,200-202", keep=keep(windows=10, age="7d", total="20GB"))
    """
    return Keep(windows, age, total)


@dataclass(frozen=True)
class Storage:
    """What happens to the files of windows after they are written.

    Args:
        keep: how long they stay; None for always. A file that is to be uploaded stays until that is done.
        upload: the URL of the folder that they are copied to; None for none.
        upload_timeout: how long the end of a run waits for uploads, in s.
    """

    keep: Keep | None = None
    upload: str | None = None
    upload_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise TypeError(f'"keep" must be the result of instrument.keep(windows=..., ...): {self.keep!r}')
        if self.upload is not None:
            check_url(self.upload)
        if isinstance(self.upload_timeout, bool) or not isinstance(self.upload_timeout, (int, float)):
            raise TypeError(f'"upload_timeout" must be a number of seconds from 0 to 600: {self.upload_timeout!r}')
        if not 0 < self.upload_timeout <= MAX_TIMEOUT_S:
            raise ValueError(
                f'"upload_timeout" must be a number of seconds from 0 to 600: {self.upload_timeout!r}'
            )

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Storage:
        """Return the storage that `dataclasses.asdict` described."""
        return cls(**given | {"keep": given["keep"] and Keep(**given["keep"])})


_SECRETS = re.compile(r"(?<=://)[^/@\s]+@|(?<=\?)[^\s'\"]+")


def check_url(url: object) -> None:
    """Check the argument ``upload`` of `profile`, without a connection.

    Raises:
        TypeError, ValueError: it is no URL, or fsspec has no package for it.
    """
    if not isinstance(url, str):
        raise TypeError(f'"upload" must be a URL such as "s3://bucket/runs/x": {url!r}')
    from fsspec.registry import available_protocols, known_implementations

    protocol = re.split("::|://", url)[0]
    if "://" not in url or protocol not in available_protocols():
        raise ValueError(
            f'"upload" must be a URL that fsspec knows, such as "s3://bucket/runs/x": {masked(url)!r}'
        )
    implementation = known_implementations.get(protocol, {})
    if implementation and find_spec(implementation["class"].partition(".")[0]) is None:
        lacks = implementation.get("err", implementation["class"])
        raise ValueError(f'"upload" to {masked(url)!r} lacks a package: {lacks}')


def masked(text: str, url: str = "") -> str:
    """Return ``text`` without the users, passwords and query parameters of ``url`` and of any URL in it."""
    password = urlsplit(url).password or ""
    for secret in filter(None, (password, unquote(password))):
        text = text.replace(secret, "***")
    return _SECRETS.sub(lambda secret: "***@" if secret[0].endswith("@") else "***", text)
