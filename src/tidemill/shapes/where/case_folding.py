"""Letters in two cases, as `lower`, `upper` and ILIKE of PostgreSQL know them. That is the collation's business:

    simple   letter by letter, as libc and PostgreSQL's own C.UTF-8 do, whatever stands beside it: ß stays ß
    ascii    of C, POSIX and ucs_basic: A to Z alone
    full     of ICU and pg_unicode_fast: as Unicode has it, ß becomes SS, and Σ at the end of a word ς

A locale with rules of its own for single letters (Turkish, Azeri, Lithuanian) is taken for one without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from tidemill.shapes.where.expressions import Expression
from tidemill.shapes.where.types import Folding, WhereError

_DOTLESS = "i"
"""Of İ, the one letter whose lower case is no single one: what remains without the dot."""
_SMALL = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
_LARGE = {small: large for large, small in _SMALL.items()}


@lru_cache(maxsize=4_096)
def _lower(letter: str) -> str:
    found = letter.lower()
    return found if len(found) == 1 else _DOTLESS


@lru_cache(maxsize=4_096)
def _upper(letter: str) -> str:
    """Where Unicode writes several, its title case is the single one, if there is one."""
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


def lower(folding: Folding, location: str) -> Callable[[str], str]:
    """Raises WhereError when it is undecided."""
    return _LOWER[_decided(folding, location)]


def upper(folding: Folding, location: str) -> Callable[[str], str]:
    """Raises WhereError when it is undecided."""
    return _UPPER[_decided(folding, location)]


def _decided(folding: Folding, location: str) -> Folding:
    if folding == "undecided":
        raise WhereError(
            f"{location}these texts have different collations.", fix='Write COLLATE "C" after one of them.'
        )
    return folding


def folding_of(*operands: Expression) -> Folding:
    """Of several operands together: an explicit collation counts before those of columns, and these before the
    database's, which constants have. Undecided where columns differ, as it is in PostgreSQL but where one of them has
    the database's."""
    some = [each for each in operands if each.collated] or [each for each in operands if not each.constant]
    found = {each.type.folding for each in some if each.type.name in ("text", "bpchar")}
    return "simple" if not found else found.pop() if len(found) == 1 else "undecided"
