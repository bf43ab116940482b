"""Writes a page into a file, and shows it in a notebook."""

from __future__ import annotations

import errno
import html
import os
from pathlib import Path

from .files import part_file, publish
from .guard import guard

_MAX_IN_NOTEBOOK = 4_000_000  # characters


def write_page(path: str | os.PathLike[str], text: str) -> Path:
    """Write the text of a page; a file of this name is replaced when the new one is complete.

    A symbolic link stays, and its target is written.

    Raises:
        OSError: the file cannot be written, or there is something else, such as a device; its ``filename`` is
            ``path``.
    """
    out = Path(path)
    if out.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(out))
    if out.exists() and not out.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(out))
    target = Path(os.path.realpath(out))
    with part_file(target) as part:
        try:
            part.write_text(text, encoding="utf-8")
            publish(part, target)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(out)) from None
    return out


def frame(text: str, height: int = 640) -> str | None:
    """Return an iframe that shows a page in a notebook, isolated from it.

    None for a page of more than four million characters, which the file of the notebook would hold: the notebook
    then shows text instead.

    Args:
        text: the text of the page.
        height: the height in pixels.
    """
    if len(text) > _MAX_IN_NOTEBOOK:
        return None
    attributes = f'width="100%" height="{height}" style="border:0"'
    return f'<iframe sandbox="allow-scripts" {attributes} srcdoc="{html.escape(text)}"></iframe>'


class InNotebook:
    """An object that a notebook shows as its page."""

    def _page(self) -> str | None:
        """Return the text of the page; None if there is nothing to show."""
        raise NotImplementedError

    @guard.contained("page in a notebook")
    def _repr_html_(self) -> str | None:
        page = self._page()
        return page and frame(page)


class Page(InNotebook):
    """An object with a page."""

    def _page(self) -> str:
        raise NotImplementedError

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, which needs no network, as one HTML file, and return its path.

        Raises:
            OSError: the file cannot be written.
        """
        return write_page(path, self._page())
