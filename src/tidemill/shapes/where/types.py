"""PostgreSQL types as the where evaluator knows them. Their values are what `base/pgtypes/text` makes of text:

    text bpchar enum  str (bpchar keeps its padding; comparison strips it)
    anything else     as `base/pgtypes/text` says

Text is what sessions of `SESSION_SETTINGS` print (ISO dates, UTC).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal, Inexact, InvalidOperation, Overflow
from functools import partial
from typing import Any, Literal

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.base.pgtypes.arrays import read_array
from tidemill.base.pgtypes.intervals import interval_span, read_interval
from tidemill.base.pgtypes.text import DISPLAY, READERS, InvalidTextError

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


class WhereError(InvalidError):
    """The filter cannot be used; the message is what the client reads in `errors.where`."""


class EvaluationError(InvalidTextError):
    """The filter fails on this row or literal, as the same expression does in PostgreSQL."""


class Type(msgspec.Struct, frozen=True):
    """`name` as above, or `unknown` for literals and parameters not yet resolved, or another pg type's name.

    ordered   text only: comparing by code points equals the collation's order
    folding   text only: what the collation takes for one letter in two cases (case_folding.py)
    labels    enum only: its labels in their order, where they are known
    varying   text only: it is varchar, which is padded like character beside it
    most_bytes  text only: it is name or "char", and longer text that is read as it is cut
    """

    name: str
    array: bool = False
    ordered: bool = True
    folding: Folding = "simple"
    labels: tuple[str, ...] = ()
    varying: bool = False
    most_bytes: int = 0

    def __str__(self) -> str:
        return DISPLAY.get(self.name, self.name) + ("[]" if self.array else "")

    @property
    def element(self) -> Type:
        return msgspec.structs.replace(self, array=False)

    @property
    def plain(self) -> Type:
        """Under the name of the type that compares exactly like it."""
        name = ALIASES.get(self.name, self.name)
        most_bytes = CUT.get(self.name, self.most_bytes)
        varying = self.varying or self.name == "varchar"
        return msgspec.structs.replace(self, name=name, varying=varying, most_bytes=most_bytes)

    def like(self, name: str, *, array: bool = False) -> Type:
        """Another type, whose text is of the same collation."""
        varying, most_bytes = (self.varying, self.most_bytes) if name == self.name else (False, 0)
        return msgspec.structs.replace(self, name=name, array=array, varying=varying, most_bytes=most_bytes)


ALIASES = {"varchar": "text", "name": "text", "char": "text"}
"""Types that compare like another."""

NAME_BYTES = 63
CHAR_BYTES = 1
CUT = {"name": NAME_BYTES, "char": CHAR_BYTES}
"""Bytes of the types that cut longer text."""


def to_float8(value: int | Decimal | float) -> float:
    """Raises EvaluationError where a finite number has no double."""
    result = float(value)  # of a Decimal beyond any double it is infinite without a word
    if math.isinf(result) and value != result:
        raise EvaluationError("value out of range: overflow")
    if result == 0 and value != 0:
        raise EvaluationError("value out of range: underflow")
    return result


def canonical(kind: str) -> Callable[[Value], Value] | None:
    """The form in which values of this kind are equal exactly where Python's are, and hash so. None: as they are."""
    if kind in ("float4", "float8", "numeric"):
        return _number
    if kind == "bpchar":
        return _unpadded
    return interval_span if kind == "interval" else None


_NAN = object()


def _number(value: float | Decimal) -> Value:
    return value if value == value else _NAN


def _unpadded(text: str) -> str:
    return text.rstrip(" ")


_READERS: dict[str, Callable[[str], Value]] = {**READERS, "interval": read_interval}


def readable(name: str) -> bool:
    return name in _READERS


def reader(type_: Type) -> Callable[[str], Value]:
    """The function that reads text of this type. Raises WhereError for types the evaluator does not know."""
    read = _READERS.get(type_.name)
    if read is None:
        raise WhereError(f"type {type_} is not supported in a where clause.", fix="Cast the column to text.")
    if type_.most_bytes:
        read = partial(cut, type_.most_bytes)
    return (lambda text: read_array(text, read)) if type_.array else read


def cut(most_bytes: int, text: str) -> str:
    """As name and "char" cut it. Raises EvaluationError for the bytes and escapes that "char" has beyond ASCII."""
    if most_bytes == CHAR_BYTES and (not text[:1].isascii() or (text[:1] == "\\" and len(text) > 1)):
        raise EvaluationError(f'the text is not read as "char" in a where clause: "{text}"')
    return text if len(text) * 4 <= most_bytes else text.encode()[:most_bytes].decode(errors="ignore")
