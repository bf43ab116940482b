"""docs/metrics.md lists every metric as its definition says."""

from __future__ import annotations

from scripts.metrics_page import PAGE, page


def test_the_page_is_made_from_the_definitions() -> None:
    """The page is what the command makes."""
    assert page() == PAGE.read_text(), "run python -m scripts.metrics_page"
