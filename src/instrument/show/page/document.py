"""Builds a page as one HTML file, which holds its style, its scripts and its compressed data and requests nothing.

A page is a title, a lead paragraph that shows without scripts, and sections. Each section is a dict with ``id``,
``type`` (which script draws it), ``title`` and the data that this script reads. Texts in it are data: the scripts
write them as text nodes, and the content security policy allows no script and no style but those of the page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

_HERE = Path(__file__).parent
_FIRST, _LAST = ("dom", "state", "table"), "main"
"""Scripts share one scope: the first define what the others use, and the last starts the page."""

Section = Mapping[str, Any]


def document(
    title: str, lead: str, sections: Iterable[Section | None], *, serve: Mapping[str, str | int] | None = None
) -> str:
    """Return the text of a page.

    Args:
        title: the title of the page, such as the name of a file.
        lead: the first paragraph.
        sections: what the page shows, in order; None for what it does not have.
        serve: what the scripts need of the server that serves the page; without it, the page may request nothing.
    """
    from jinja2 import Environment

    script, style = _script(), _style()
    data = {
        "title": title,
        "sections": [section for section in sections if section is not None],
        "serve": dict(serve or {}),
    }
    packed = gzip.compress(msgspec.json.encode(data), compresslevel=6, mtime=0)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data: blob:",
        "connect-src": "'self'" if serve else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    template = Environment(autoescape=True).from_string((_HERE / "template.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        lead=lead,
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        script=script,
        style=style,
        data=base64.b64encode(packed).decode(),
    )


@cache
def _script() -> str:
    files = {file.stem: file for file in sorted((_HERE / "scripts").glob("*.js"))}
    others = [name for name in files if name not in (*_FIRST, _LAST)]
    return "\n".join(files[name].read_text(encoding="utf-8") for name in (*_FIRST, *others, _LAST))


@cache
def _style() -> str:
    return (_HERE / "style.css").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
