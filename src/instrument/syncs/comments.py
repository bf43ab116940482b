"""Comments of a statement: ``# instrument: allow-sync REASON`` on any of its lines, or alone on the line above."""

from __future__ import annotations

import ast
import io
import linecache
import re
import tokenize
from functools import lru_cache

from .finding import Site

_COMMENT = re.compile(r"#\s*instrument:\s*allow-sync\b[\s:,-]*(.*)")
_NO_REASON = "a comment at the line"


def allowed_at(site: Site | None) -> str | None:
    """Return the reason that a comment gives for a wait at ``site``; None where there is none."""
    if site is None or not site.line:
        return None
    source = "".join(linecache.getlines(site.file))
    if "allow-sync" not in source:
        return None
    reasons, alone = _comments(source)
    first, last = _statement(source, site.line)
    lines = [*range(first, last + 1), *([first - 1] if first - 1 in alone else [])]
    return next((reasons[line] for line in lines if line in reasons), None)


@lru_cache(maxsize=64)
def _comments(source: str) -> tuple[dict[int, str], set[int]]:
    """Return the reasons by their lines, and the lines that hold nothing else."""
    reasons: dict[int, str] = {}
    alone: set[int] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            found = _COMMENT.match(token.string) if token.type == tokenize.COMMENT else None
            if found is not None:
                reasons[token.start[0]] = found.group(1).strip() or _NO_REASON
                if token.line.lstrip().startswith("#"):
                    alone.add(token.start[0])
    except (tokenize.TokenError, SyntaxError):  # what came before holds
        pass
    return reasons, alone


def _statement(source: str, line: int) -> tuple[int, int]:
    """Return the first and the last line of the statement at ``line``, without the body that it may have."""
    spans = [span for span in _spans(source) if span[0] <= line <= span[1]]
    return max(spans, default=(line, line))


@lru_cache(maxsize=64)
def _spans(source: str) -> list[tuple[int, int]]:
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    spans = []
    for node in nodes:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
            spans.append((node.lineno, max(end or node.lineno, node.lineno)))
    return spans
