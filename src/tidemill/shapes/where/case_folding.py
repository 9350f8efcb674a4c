"""Converts letters to lower and upper case, as `lower_function`, `upper_function` and ILIKE of PostgreSQL do. The
result depends on the collation:

    simple   letter by letter, as libc and PostgreSQL's own C.UTF-8 do, independent of neighbors: ß remains ß
    ascii    for C, POSIX and ucs_basic: A to Z only
    full     for ICU and pg_unicode_fast: the full Unicode mapping, ß becomes SS, and Σ at the end of a word ς

Locale-specific rules for single letters (Turkish, Azeri, Lithuanian) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from tidemill.shapes.where.collations import undecided_error
from tidemill.shapes.where.types import Folding

_DOTLESS = "i"
"""Lower case of İ, the only letter whose lower case has several characters: the i without the dot above."""
_SMALL = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
_LARGE = {small: large for large, small in _SMALL.items()}


@lru_cache(maxsize=4_096)
def _lower(letter: str) -> str:
    found = letter.lower()
    return found if len(found) == 1 else _DOTLESS


@lru_cache(maxsize=4_096)
def _upper(letter: str) -> str:
    """Return the upper case of a letter. If it has several characters, use the title case if that is a single one."""
    return next((found for found in (letter.upper(), letter.title()) if len(found) == 1), letter)


def _simple_lower(text: str) -> str:
    return text.lower() if text.isascii() else "".join(map(_lower, text))


def _simple_upper(text: str) -> str:
    return text.upper() if text.isascii() else "".join(map(_upper, text))


def _ascii_lower(text: str) -> str:
    return text.lower() if text.isascii() else text.translate(_SMALL)


def _ascii_upper(text: str) -> str:
    return text.upper() if text.isascii() else text.translate(_LARGE)


_LOWER: dict[Folding, Callable[[str], str]] = {
    "simple": _simple_lower,
    "ascii": _ascii_lower,
    "full": str.lower,
}
_UPPER: dict[Folding, Callable[[str], str]] = {
    "simple": _simple_upper,
    "ascii": _ascii_upper,
    "full": str.upper,
}


def lower_function(folding: Folding, location: str) -> Callable[[str], str]:
    """Return the function for lower case. Raises WhereError if the collations differ."""
    return _LOWER[_require_decided(folding, location)]


def upper_function(folding: Folding, location: str) -> Callable[[str], str]:
    """Return the function for upper case. Raises WhereError if the collations differ."""
    return _UPPER[_require_decided(folding, location)]


def _require_decided(folding: Folding, location: str) -> Folding:
    if folding == "undecided":
        raise undecided_error(location)
    return folding
