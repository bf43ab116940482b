"""`KnownWords`: replaces the words of a name that are not in the vocabulary of torch and its libraries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

VOCABULARY = Path(__file__).with_name("vocabulary.txt")
"""The words, one on each line, sorted, in lower case; "#" stands for the digits of a number."""

_PIECE = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"\d+")
_LONG_NUMBER = re.compile(r"\d{7}")  # longer numbers may identify something
# "LayerNorm2d" is layer, norm#d; "bf16_s16816gemm" is bf#, s#gemm
_WORD = re.compile(r"(?:[A-Z]+(?![^\W\dA-Z_])|[A-Z]?[^\W\dA-Z_]+|\d)(?:\d+[^\W\dA-Z_]*)*")
_SPELLED = 2  # words of one or two letters in a piece; more may spell anything

# What rules search inside words. It stays where the rest of the word goes, so that a kernel keeps its family.
_PARTS = re.compile(
    r"(gemm|gemv|nvjet|matmul|splitk|flash|fmha|attention|attn|sdpa|conv(?:olution)?|[wd]grad|fprop|winograd|im2col|col2im"
    r"|soft_?max|norm|welford|rotary|swiglu|silu|gelu|relu|dropout|embedding|gather|scatter|segment|reduce|cudnn"
    r"|copy|transpose|permute|cast|pool|elementwise|foreach|adam|adagrad|nccl|rccl|nvshmem|rocshmem|msccl|hccl"
    r"|all(?:reduce|gather|toall)|dispatch|combine|notify|barrier|[hiq]mma|gmma|mfma|wmma|xmma|xdlops|tensorop"
    r"|[mn](?:x|v)fp[48]|tf32|xf32|bf16|f16|fp?32|fp8|align|stream|event|device|synchronize|memcpy|memset|malloc|free"
    r"|launchkernel|graphlaunch|backward|nchw|nhwc|(?<=\d)x(?=\d)|(?<!\d)\d{1,6}(?!\d))",
    re.IGNORECASE,
)

# A mangled name: the length of an identifier, unless it belongs to a substitution or a number in a template.
_LENGTH = re.compile(r"(?:S[0-9A-Z]*_|(?:L[a-z]n?|E)\d+E)|([1-9]\d{0,3})")
_CODES = re.compile(  # between identifiers: scopes, substitutions, numbers and short runs of types
    r"(?:[NIE]|(?<=E)Z(?=N)|S[0-9A-Z]?_|S[tabsiod](?![a-z])|T\d?_|L(?:[a-z]n?\d{1,6}E|(?=N))|[PRKO]+(?=[a-zNST])"
    r"|DF\d\d_?b?|U[lt](?=[a-zNPRE])|[CD][0-3](?=E)|(?<![a-z])[a-z]{1,3}(?![a-z])|(?<![a-z])([a-z])\1+(?![a-z])|_)*"
)


class KnownWords:
    """Replaces unknown words by stand-ins.

    A name is split at signs, underscores and changes of case; a word with its numbers is known if the vocabulary
    has it. The signs, the known words and the numbers of up to six digits stay.

    Args:
        stand_in: returns the stand-in of a word.
    """

    def __init__(self, stand_in: Callable[[str], str]) -> None:
        self._stand_in = stand_in

    def mask(self, name: str) -> str:
        """Return the name with stand-ins for its unknown words."""
        if name.startswith("_Z"):
            return "_Z" + "".join(self._mangled(name))
        return _PIECE.sub(lambda piece: "".join(map(self._word, words_of(piece[0]))), name)

    def parts(self, text: str) -> str:
        """Return a stand-in of a whole text, with the parts of its words that rules search."""
        return " ".join([self._stand_in(text), *(part for part in _PARTS.findall(text) if part.isalpha())])

    def _word(self, word: str) -> str:
        if is_known(word):
            return word
        parts = _PARTS.split(word)  # what stays is at the odd places
        return "".join(
            part if place % 2 or not part else self._stand_in(f"{word} {place}" if place else word)
            for place, part in enumerate(parts)
        )

    def _mangled(self, name: str) -> Iterator[str]:
        """Yield the identifiers, each with its length, and the codes between them."""
        place = begin = len("_Z")
        while length := _LENGTH.search(name, place):
            place = length.end()
            word = name[place : place + int(length[1])] if length[1] else ""
            if word.isidentifier():
                yield from self._codes(name[begin : length.start()])
                masked = self.mask(word)
                whole = len(word) == int(length[1])  # else the name was cut off
                yield f"{len(masked) if whole else max(int(length[1]), len(masked))}{masked}"
                place = begin = place + len(word)
        yield from self._codes(name[begin:])

    def _codes(self, codes: str) -> Iterator[str]:
        if _CODES.fullmatch(codes):
            yield codes
        else:
            stand_in = self._stand_in(codes)
            yield f"{len(stand_in)}{stand_in}"


def words_of(piece: str) -> list[str]:
    """Return the words of a part of a name between signs and underscores."""
    words = [match[0] for match in _WORD.finditer(piece)]
    short = sum(len(word) <= _SPELLED and word.isalpha() for word in words)
    return words if short <= _SPELLED and "".join(words) == piece else [piece]


def is_known(word: str) -> bool:
    """Return whether the vocabulary has a word, and its numbers are short."""
    return pattern_of(word) in vocabulary() and not _LONG_NUMBER.search(word)


def pattern_of(word: str) -> str:
    """Return a word as the vocabulary has it: in lower case, with "#" for its numbers."""
    return _NUMBER.sub("#", word.lower())


def is_all_known(name: str) -> bool:
    """Return whether the vocabulary has all words of a name that is not mangled."""
    return all(is_known(word) for piece in _PIECE.findall(name) for word in words_of(piece))


@lru_cache(maxsize=1)
def vocabulary() -> frozenset[str]:
    """Return the words; they are read once, when the first name is replaced."""
    return frozenset(VOCABULARY.read_text(encoding="ascii").split())
