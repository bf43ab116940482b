"""URLs that fsspec writes to: whether one is accepted, and how it is shown without its secrets."""

from __future__ import annotations

import re
from importlib.util import find_spec
from urllib.parse import unquote, urlsplit

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
    known = known_implementations.get(protocol, {})
    if known and find_spec(known["class"].partition(".")[0]) is None:
        raise ValueError(f'"upload" to {masked(url)!r} lacks a package: {known.get("err", known["class"])}')


def masked(text: str, url: str = "") -> str:
    """Return ``text`` without the users, passwords and query parameters of ``url`` and of any URL in it."""
    password = urlsplit(url).password or ""
    for secret in filter(None, (password, unquote(password))):
        text = text.replace(secret, "***")
    return _SECRETS.sub(lambda found: "***@" if found[0].endswith("@") else "***", text)
