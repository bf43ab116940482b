"""Comments ``# instrument: allow-sync REASON`` on any line of a statement, or alone on the line above."""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import linecache
import re
import tokenize
from collections.abc import Iterable, Iterator

from ...base.findings import Site, SyncFinding

_KEYWORD = "allow-sync"
_OURS = re.compile(r"#\s*instrument\b[\W_]*(.*)", re.IGNORECASE)
_COMMENT = re.compile(r"#\s*instrument:\s*allow-sync\b[\s:,-]*(.*)")
_NO_REASON = "a comment at the line"


def allowed_at(site: Site | None) -> str | None:
    """Return the reason of the comment that allows synchronizations at ``site``, or None."""
    if site is None or not site.line:
        return None
    lines = linecache.getlines(site.file)
    if site.file not in _files or _files[site.file][0] is not lines:  # linecache reads a changed file anew
        _files[site.file] = (lines, _reasons("".join(lines)))
    return _files[site.file][1].get(site.line)


_files: dict[str, tuple[list[str], dict[int, str]]] = {}


def mistaken_comments(findings: Iterable[SyncFinding]) -> list[str]:
    """Return a sentence on each comment that was meant to allow something, in the files of ``findings``."""
    # without a line, the file of a trace is not one that can be read, or is not safe to read
    files = dict.fromkeys(
        finding.site.file for finding in findings if finding.site is not None and finding.site.line
    )
    return [
        f"{Site(file, line, '').shown}:{line}: the comment {text!r} allows nothing: {why}"
        for file in files
        for line, text, why in _mistakes("".join(linecache.getlines(file)))
    ]


def _mistakes(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, text and mistake of each comment that resembles one that allows, but is none."""
    if "instrument" not in source:
        return
    claimed = {line for first, last in _statement_spans(source) for line in range(first - 1, last + 1)}
    for token in _comment_tokens(source):
        ours, line = _OURS.match(token.string), token.start[0]
        if _COMMENT.match(token.string):
            if line not in claimed:
                yield line, token.string, "it belongs on a line of a statement, or alone on the line above"
        elif ours and difflib.get_close_matches(_first_words(ours.group(1)), [_KEYWORD], cutoff=0.7):
            yield line, token.string, f'did you mean "# instrument: {_KEYWORD} REASON"?'


def _first_words(text: str) -> str:
    return "-".join(re.split(r"[\W_]+", text.lower())[:2])


def _reasons(source: str) -> dict[int, str]:
    """Return the reasons by line of their statements; 30 ms for 1,000 lines, once for each file."""
    if _KEYWORD not in source:
        return {}
    reasons, alone = dict[int, str](), set[int]()
    for token in _comment_tokens(source):
        if comment := _COMMENT.match(token.string):
            reasons[token.start[0]] = comment.group(1).strip() or _NO_REASON
            if token.line.lstrip().startswith("#"):
                alone.add(token.start[0])
    spans = sorted(_statement_spans(source))  # inner statements come later
    statement = {line: span for span in spans for line in range(span[0], span[1] + 1)}
    allowed = {}
    for number in range(1, source.count("\n") + 2):
        first, last = statement.get(number, (number, number))
        above = [first - 1] if first - 1 in alone else []
        reason = next((reasons[line] for line in [*range(first, last + 1), *above] if line in reasons), None)
        if reason is not None:
            allowed[number] = reason
    return allowed


def _comment_tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # the tokens so far are valid
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token


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
