"""Settings of Sphinx, which `make docs` runs on the root of the repository: links work as they do on GitHub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

project = "instrument"
author = "The instrument authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/*.md", "docs/*.rst", "integrations/*/README.md"]
root_doc = "README"
default_role = "py:obj"

smartquotes = False

html_theme = "furo"
html_title = "instrument"
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4  # the anchors that GitHub makes

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

CONTENTS = {
    "Use": [
        "annotating",
        "modules",
        "windows",
        "black-box",
        "dashboards",
        "run",
        "frameworks",
        "syncs",
        "dry-run",
        "contract",
        "traces",
        "diagnose",
        "what-if",
        "forecast",
        "compare",
        "slim",
        "agents",
        "doctor",
    ],
    "Look up": [
        "reference",
        "rules",
        "metrics",
        "glossary",
        "globals",
        "costs",
        "support",
        "simulated-gpu",
        "public-scripts",
        "windows-reference",
        "patches",
    ],
    "Work on it": ["architecture", "/CONTRIBUTING", "/CHANGELOG"],
}


LISTED = {name for pages in CONTENTS.values() for name in pages}
CONTENTS["Look up"] += sorted({page.stem for page in Path(__file__).parent.glob("*.md")} - LISTED)


def add_contents(_: Any, page: str, source: list[str]) -> None:
    """Append the table of contents to the README, and the pages of integrations to the list of frameworks."""
    if page == "README":
        for caption, pages in CONTENTS.items():
            source[0] += contents(["docs/" + name if name[0] != "/" else name for name in pages], caption)
    if page == "docs/frameworks":
        source[0] += contents(["/integrations/*/README"], "")


def contents(pages: list[str], caption: str) -> str:
    """Return a hidden table of contents, as MyST writes it."""
    options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def add_index(app: Any, error: Exception | None) -> None:
    """Write the page that a server shows for the folder."""
    if error is None and app.builder.name == "html":
        (Path(app.outdir) / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')


def setup(app: Any) -> None:
    """Connect both to Sphinx."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
