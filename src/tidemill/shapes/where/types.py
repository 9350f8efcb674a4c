"""PostgreSQL types as the where evaluator knows them. Their values are what `base/pgtext` makes of text:

    text bpchar enum  str (bpchar keeps its padding; comparison strips it)
    anything else     as `base/pgtext` says

Text is what sessions of `SESSION_SETTINGS` print (ISO dates, UTC).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal, Inexact, InvalidOperation, Overflow
from typing import Any, Literal

import msgspec

from tidemill.base.errors import Invalid
from tidemill.base.pgarrays import read_array
from tidemill.base.pgtext import DISPLAY, READERS, Refused

Value = Any
NUMBERS = {"int2": 0, "int4": 1, "int8": 2, "numeric": 3, "float4": 4, "float8": 5}
"""Promotion order of binary operators; a float on one side makes the operation float8."""
TEXTS = frozenset({"text", "bpchar", "enum"})
MOMENTS = {"date": 0, "timestamp": 1, "timestamptz": 2}

WIDE = Context(prec=70_000, Emax=999_999, Emin=-999_999, traps=[InvalidOperation, Inexact, Overflow])
"""+, -, * and % are exact on numbers of NUMERIC_DIGITS, or raise; a result is held to the same size again."""

Folding = Literal["simple", "ascii", "full", "undecided"]

ROUNDING = Context(prec=70_000, Emax=999_999, Emin=-999_999, traps=[InvalidOperation, Overflow])
"""For what rounds on purpose: quotients, casts."""


class WhereError(Invalid):
    """The filter cannot be used; the message is what the client reads in `errors.where`."""


class EvaluationError(Refused):
    """The filter fails on this row or literal, as the same expression does in PostgreSQL."""


class Type(msgspec.Struct, frozen=True):
    """`name` as above, or `unknown` for literals and parameters not yet resolved, or another pg type's name.

    ordered   text only: comparing by code points equals the collation's order
    folding   text only: what the collation takes for one letter in two cases (folding.py)
    """

    name: str
    array: bool = False
    ordered: bool = True
    folding: Folding = "simple"

    def __str__(self) -> str:
        return DISPLAY.get(self.name, self.name) + ("[]" if self.array else "")

    @property
    def element(self) -> Type:
        return Type(self.name, False, self.ordered, self.folding)

    @property
    def plain(self) -> Type:
        """Under the name of the type that compares exactly like it."""
        return Type(ALIASES.get(self.name, self.name), self.array, self.ordered, self.folding)

    def like(self, name: str, *, array: bool = False) -> Type:
        """Another type, whose text is of the same collation."""
        return Type(name, array, self.ordered, self.folding)


ALIASES = {"varchar": "text", "name": "text", "char": "text"}
"""Types that compare exactly like another."""


def to_float8(value: int | Decimal | float) -> float:
    """Raises EvaluationError where a finite number has no double."""
    result = float(value)  # of a Decimal beyond any double it is infinite without a word
    if math.isinf(result) and value != result:
        raise EvaluationError("value out of range: overflow")
    if result == 0 and value != 0:
        raise EvaluationError("value out of range: underflow")
    return result


def reader(type_: Type) -> Callable[[str], Value]:
    """The function that reads text of this type. Raises WhereError for types the evaluator does not know."""
    read = READERS.get(type_.name)
    if read is None:
        raise WhereError(f"type {type_} is not supported in a where clause.", fix="Cast the column to text.")
    return (lambda text: read_array(text, read)) if type_.array else read
