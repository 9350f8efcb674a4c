"""PostgreSQL types as the where evaluator knows them. Values are those that `base/pgtypes/text` reads from text:

    text bpchar enum  str (bpchar keeps its padding; comparison strips it)
    all others        see `base/pgtypes/text`

Text is in the format that sessions with `SESSION_SETTINGS` print (ISO dates, UTC).
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

EXACT_CONTEXT = Context(prec=70_000, Emax=999_999, Emin=-999_999, traps=[InvalidOperation, Inexact, Overflow])
"""Context for +, -, * and %, which are exact on numbers of NUMERIC_DIGITS, or raise; the result is then checked for the
same size."""

Folding = Literal["simple", "ascii", "full", "undecided"]

ROUNDING_CONTEXT = Context(prec=70_000, Emax=999_999, Emin=-999_999, traps=[InvalidOperation, Overflow])
"""Context for intended rounding: quotients, casts."""


UTF8 = "UTF8"


class WhereError(InvalidError):
    """The filter cannot be used; the client gets the message in `errors.where`."""


class EvaluationError(InvalidTextError):
    """The filter fails on this row or literal, as the same expression does in PostgreSQL."""


class Type(msgspec.Struct, frozen=True):
    """A PostgreSQL type. `name`: one of the above, `unknown` for unresolved literals and parameters, or another type's
    name.

    ordered     text only: the collation orders by code points
    folding     text only: how the collation converts case (case_folding.py)
    labels      enum only: its labels in order, if known
    varying     text only: the type is varchar, which ignores padding when compared with character
    most_bytes  text only: the type is name or "char", and longer text is truncated when read
    collation   text only: the collation's name, "" = the database's own (collations.py)
    encoding    columns only: the encoding of their database (encodings.py)
    """

    name: str
    array: bool = False
    ordered: bool = True
    folding: Folding = "simple"
    labels: tuple[str, ...] = ()
    varying: bool = False
    most_bytes: int = 0
    collation: str = ""
    encoding: str = UTF8

    def __str__(self) -> str:
        return DISPLAY.get(self.name, self.name) + ("[]" if self.array else "")

    @property
    def element(self) -> Type:
        return msgspec.structs.replace(self, array=False)

    @property
    def base_type(self) -> Type:
        """The type of a column's values, under the name of the type that compares exactly like it."""
        name = ALIASES.get(self.name, self.name)
        most_bytes = TRUNCATED_BYTES.get(self.name, self.most_bytes)
        varying = self.varying or self.name == "varchar"
        return msgspec.structs.replace(self, name=name, varying=varying, most_bytes=most_bytes, encoding=UTF8)

    def with_name(self, name: str, *, array: bool = False) -> Type:
        """Return another type, whose text has the same collation."""
        varying, most_bytes = (self.varying, self.most_bytes) if name == self.name else (False, 0)
        return msgspec.structs.replace(self, name=name, array=array, varying=varying, most_bytes=most_bytes)


ALIASES = {"varchar": "text", "name": "text", "char": "text"}
"""Types that compare like another type."""

NAME_BYTES = 63
CHAR_BYTES = 1
TRUNCATED_BYTES = {"name": NAME_BYTES, "char": CHAR_BYTES}
"""Length in bytes of the types that truncate longer text."""


def to_float8(value: int | Decimal | float) -> float:
    """Convert a number to a double. Raises EvaluationError if a finite number has none."""
    result = float(value)  # float() of a too large Decimal is infinite
    if math.isinf(result) and value != result:
        raise EvaluationError("value out of range: overflow")
    if result == 0 and value != 0:
        raise EvaluationError("value out of range: underflow")
    return result


def canonical_form(kind: str) -> Callable[[Value], Value] | None:
    """Return a function to a form that is equal, and hashes, exactly if the values are equal in PostgreSQL. None if no
    conversion is needed."""
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


TEXT_ONLY = frozenset({"json", "jsonb", "bytea"})
"""Types without operators here. Their cast to text is the text that the database prints; types whose cast differs,
such as inet, are not among them."""


def is_readable(name: str) -> bool:
    return name in _READERS


def reader_of(type_: Type) -> Callable[[str], Value]:
    """Return the function that parses text of this type. Raises WhereError for types that the evaluator does not
    know."""
    read = _READERS.get(type_.name)
    if read is None:
        fix = "Compare its text: column::text." if type_.name in TEXT_ONLY and not type_.array else ""
        raise WhereError(f"type {type_} is not supported in a where clause.", fix=fix)
    if type_.most_bytes:
        read = partial(truncate, type_.most_bytes)
    return (lambda text: read_array(text, read)) if type_.array else read


def truncate(most_bytes: int, text: str) -> str:
    """Truncate text as name and "char" do. Raises EvaluationError for bytes and escapes beyond ASCII in a "char"."""
    if most_bytes == CHAR_BYTES and (not text[:1].isascii() or (text[:1] == "\\" and len(text) > 1)):
        raise EvaluationError(f'this text is not supported as "char" in a where clause: "{text}"')
    return text if len(text) * 4 <= most_bytes else text.encode()[:most_bytes].decode(errors="ignore")
