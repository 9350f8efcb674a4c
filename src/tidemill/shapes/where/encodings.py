"""Text of databases whose encoding is not UTF8. Rows and clauses arrive in UTF-8 from all of them.

    UTF8                as is
    SQL_ASCII           PostgreSQL takes each byte for a character: it counts, cuts and matches bytes, and orders by
                        them. So the evaluator works on texts with one character per byte (`as_bytes`)
    LATIN1              bytes are code points
    any other           bytes are in another order than code points, so text cannot be ordered here

Values of type `name` are truncated to 63 bytes of the database's encoding. The evaluator does that in UTF8 only, and
rejects such columns of other databases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidemill.shapes.where.collations import UNDECIDED, common_collation
from tidemill.shapes.where.expressions import Evaluate, Expression, Row
from tidemill.shapes.where.types import UTF8, Type, Value, WhereError

SQL_ASCII = "SQL_ASCII"
CODE_POINT_ORDERED = frozenset({UTF8, SQL_ASCII, "LATIN1"})
"""Encodings in which collation C orders by code points."""

_CASE_CONVERSIONS = {"lower": "lower", "upper": "upper", "~~*": "ILIKE", "!~~*": "NOT ILIKE"}


def encoding_of(columns: Mapping[str, Type]) -> str:
    """Return the encoding of the database that has these columns."""
    return next((type_.encoding for type_ in columns.values()), UTF8)


def as_bytes(text: str) -> str:
    """Return the text with one character per byte of its UTF-8."""
    return text if text.isascii() else text.encode().decode("latin-1")


def type_in_encoding(type_: Type, encoding: str) -> Type:
    """Return the type of a column as its values are evaluated."""
    if encoding == UTF8:
        return type_
    if type_.name == "name":
        return msgspec.structs.replace(type_, name=f"name in a database with encoding {encoding}")
    if encoding == SQL_ASCII and type_.labels:
        return msgspec.structs.replace(type_, labels=tuple(map(as_bytes, type_.labels)))
    return type_


def expression_in_encoding(expression: Expression, encoding: str, columns: frozenset[str]) -> Expression:
    """Return the expression over `columns`, compiled for texts of an encoding, for rows as they arrive."""
    if encoding != SQL_ASCII:
        return expression
    equality = expression.equality
    if equality is not None:
        equality = msgspec.structs.replace(equality, read=_on_bytes(equality.read, frozenset({equality.column})))
    evaluate = _on_bytes(expression.evaluate, columns)
    return msgspec.structs.replace(expression, evaluate=evaluate, equality=equality)


def _on_bytes(evaluate: Evaluate, columns: frozenset[str]) -> Evaluate:
    def call(row: Row) -> Value:
        return evaluate({name: None if (text := row[name]) is None else as_bytes(text) for name in columns})

    return call


def check_case_conversion(name: str, operands: Sequence[Expression], encoding: str, location: str) -> None:
    """Raise WhereError for a function or operator that converts letters as only the database can.

    A locale may convert any byte of an SQL_ASCII text. In other encodings some letters have no upper case (the µ and ÿ
    of LATIN1), although Unicode has one.
    """
    conversion = _CASE_CONVERSIONS.get(name)
    if conversion is None or encoding == UTF8 or (encoding != SQL_ASCII and name != "upper"):
        return
    collation = common_collation(*operands, location=location)
    if collation.name != UNDECIDED and collation.folding != "ascii":
        raise WhereError(
            f"{location}{conversion} depends on the locale of a database with encoding {encoding}.",
            fix='Write COLLATE "C" after the text: then A to Z are converted.',
        )
