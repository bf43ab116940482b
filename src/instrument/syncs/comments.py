"""Comments ``# instrument: allow-sync REASON`` on any line of a statement, or alone on the line above."""

from __future__ import annotations

import ast
import io
import linecache
import re
import tokenize

from ..findings import Site

_COMMENT = re.compile(r"#\s*instrument:\s*allow-sync\b[\s:,-]*(.*)")
_NO_REASON = "a comment at the line"


def allowed_at(site: Site | None) -> str | None:
    """Return the reason of the comment that allows synchronizations at ``site``, or None."""
    if site is None or not site.line:
        return None
    lines = linecache.getlines(site.file)
    known = _files.get(site.file)
    if known is None or known[0] is not lines:  # linecache reads a changed file into another list
        known = _files[site.file] = (lines, _reasons("".join(lines)))
    return known[1].get(site.line)


_files: dict[str, tuple[list[str], dict[int, str]]] = {}


def _reasons(source: str) -> dict[int, str]:
    """Return the reasons by line of their statements; 30 ms for 1,000 lines, once for each file."""
    if "allow-sync" not in source:
        return {}
    reasons, alone = _comments(source)
    spans = sorted(_statement_spans(source))  # inner statements come later
    statement = {line: span for span in spans for line in range(span[0], span[1] + 1)}
    found = {}
    for number in range(1, source.count("\n") + 2):
        first, last = statement.get(number, (number, number))
        above = [first - 1] if first - 1 in alone else []
        reason = next((reasons[line] for line in [*range(first, last + 1), *above] if line in reasons), None)
        if reason is not None:
            found[number] = reason
    return found


def _comments(source: str) -> tuple[dict[int, str], set[int]]:
    """Return the reasons by line, and the lines that hold only a comment."""
    reasons: dict[int, str] = {}
    alone: set[int] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            found = _COMMENT.match(token.string) if token.type == tokenize.COMMENT else None
            if found is not None:
                reasons[token.start[0]] = found.group(1).strip() or _NO_REASON
                if token.line.lstrip().startswith("#"):
                    alone.add(token.start[0])
    except (tokenize.TokenError, SyntaxError):  # the tokens so far are valid
        pass
    return reasons, alone


def _statement_spans(source: str) -> list[tuple[int, int]]:
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
