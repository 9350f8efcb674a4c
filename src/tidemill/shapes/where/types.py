"""PostgreSQL types as the where evaluator knows them: reading text into comparable Python values.

    bool              bool
    int2 int4 int8    int, checked against the type's range
    numeric           Decimal (NaN and infinities included)
    float4 float8     float (float4 rounded to single precision)
    text bpchar enum  str (bpchar keeps its padding; comparison strips it)
    uuid              str, canonical lower case: its order is the byte order
    date              days since 1970-01-01;  ±inf
    time              microseconds of the day
    timestamp(tz)     microseconds since 1970-01-01 UTC;  ±inf
    arrays            nested lists, None for NULL

Text is what sessions of `SESSION_SETTINGS` print (ISO dates, UTC). What is not read here raises
`EvaluationError`, as PostgreSQL would raise `invalid input syntax`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from decimal import Context, Decimal, Inexact, InvalidOperation, Overflow
from typing import Any

import msgspec

from tidemill.base.errors import Invalid

Value = Any
INTEGERS = {"int2": 1 << 15, "int4": 1 << 31, "int8": 1 << 63}
NUMBERS = {"int2": 0, "int4": 1, "int8": 2, "numeric": 3, "float4": 4, "float8": 5}
"""Promotion order of binary operators; a float on one side makes the operation float8."""
TEXTS = frozenset({"text", "bpchar", "enum"})
MOMENTS = {"date": 0, "timestamp": 1, "timestamptz": 2}

NUMERIC_DIGITS = 16_000
"""Numbers with more digits, on either side of the point, are refused: PostgreSQL goes further (131,072 and 16,383), but
one operation on such numbers must not cost the loop more than a few milliseconds."""

WIDE = Context(prec=70_000, Emax=999_999, Emin=-999_999, traps=[InvalidOperation, Inexact, Overflow])
"""+, -, * and % are exact on numbers of NUMERIC_DIGITS, or raise; a result is held to the same size again."""

ROUNDING = Context(prec=70_000, Emax=999_999, Emin=-999_999, traps=[InvalidOperation, Overflow])
"""For what rounds on purpose: quotients, casts."""


class WhereError(Invalid):
    """The filter cannot be used; the message is what the client reads in `errors.where`."""


class EvaluationError(Exception):
    """The filter fails on this row or literal, as the same expression does in PostgreSQL."""


class Type(msgspec.Struct, frozen=True):
    """`name` as above, or `unknown` for literals and parameters not yet resolved, or another pg type's name.

    ordered   text only: comparing by code points equals the collation's order
    """

    name: str
    array: bool = False
    ordered: bool = True

    def __str__(self) -> str:
        return _DISPLAY.get(self.name, self.name) + ("[]" if self.array else "")

    @property
    def element(self) -> Type:
        return Type(self.name, False, self.ordered)


_DISPLAY = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "float4": "real",
    "float8": "double precision",
    "bpchar": "character",
    "time": "time without time zone",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
}

ALIASES = {"varchar": "text", "name": "text", "char": "text"}
"""Types that compare exactly like another."""

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_INT = re.compile(r"[ \t\n\r\f\v]*[+-]?\d+[ \t\n\r\f\v]*\Z")
_NUMERIC = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\Z")
_NONZERO = re.compile(r"[+-]?[0.]*[1-9]")
_DATE = re.compile(r"(\d{4,7})-(\d{1,2})-(\d{1,2})( BC)?\Z")
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?\Z")
_MOMENT = re.compile(
    r"(\d{4,7}-\d{1,2}-\d{1,2})(?:[ T](\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?))?"
    r" ?(Z|UTC|[+-]\d{2}(?::?\d{2})?)?( BC)?\Z",
    re.IGNORECASE,
)
_UUID = re.compile(r"[0-9a-f]{32}\Z")
_SPECIAL = {
    "nan": "nan",
    "inf": "inf",
    "infinity": "inf",
    "+inf": "inf",
    "+infinity": "inf",
    "-inf": "-inf",
    "-infinity": "-inf",
}


def _fail(type_name: str, text: str) -> EvaluationError:
    return EvaluationError(f'invalid input syntax for type {_DISPLAY.get(type_name, type_name)}: "{text}"')


def read_bool(text: str) -> bool:
    word = text.strip().lower()
    if word and (any(t.startswith(word) for t in _TRUE[:2]) or word in ("on", "1")):
        return True
    if word and (any(f.startswith(word) for f in _FALSE[:2]) or word in ("of", "off", "0")):
        return False
    raise _fail("bool", text)


def check_integer(name: str, value: int) -> int:
    bound = INTEGERS[name]
    if not -bound <= value < bound:
        raise EvaluationError(f"{_DISPLAY[name]} out of range")
    return value


INTEGER_DIGITS = 100
"""With sign, blanks and leading zeros; PostgreSQL has no such limit, and nobody writes such a number."""


def _read_integer(name: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not _INT.match(text):
            raise _fail(name, text)
        if len(text) > INTEGER_DIGITS:  # Python refuses to read very long ones
            raise EvaluationError(f"{_DISPLAY[name]} out of range")
        return check_integer(name, int(text))

    return read


def read_numeric(text: str) -> Decimal:
    word = text.strip()
    special = _SPECIAL.get(word.lower())
    if special is not None:
        return Decimal(special)
    if not _NUMERIC.match(word):
        raise _fail("numeric", text)
    if len(word) > 2 * NUMERIC_DIGITS:
        raise too_wide()
    try:
        return check_numeric(Decimal(word))
    except InvalidOperation as error:  # an exponent beyond any
        raise too_wide() from error


def too_wide() -> EvaluationError:
    return EvaluationError(f"a number of more than {NUMERIC_DIGITS} digits is not supported in a where clause")


def check_numeric(value: Decimal) -> Decimal:
    if value and value.is_finite() and not -NUMERIC_DIGITS <= value.adjusted() <= NUMERIC_DIGITS:
        raise too_wide()
    return value


def read_float8(text: str) -> float:
    word = text.strip()
    special = _SPECIAL.get(word.lower())
    if special is not None:
        return float(special)
    if not _NUMERIC.match(word):
        raise _fail("float8", text)
    value = float(word)
    if math.isinf(value) or (value == 0 and _NONZERO.match(word)):
        raise EvaluationError(f'"{text}" is out of range for type double precision')
    return value


def to_float8(value: int | Decimal | float) -> float:
    """Raises EvaluationError where a finite number has no double."""
    result = float(value)  # of a Decimal beyond any double it is infinite without a word
    if math.isinf(result) and value != result:
        raise EvaluationError("value out of range: overflow")
    if result == 0 and value != 0:
        raise EvaluationError("value out of range: underflow")
    return result


def to_float4(value: float) -> float:
    try:
        result = float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError as error:
        raise EvaluationError("value out of range: overflow") from error
    if result == 0 and value != 0:
        raise EvaluationError("value out of range: underflow")
    return result


def read_float4(text: str) -> float:
    return to_float4(read_float8(text))


def read_text(text: str) -> str:
    return text


def read_uuid(text: str) -> str:
    digits = text.strip().strip("{}").replace("-", "").lower()
    if not _UUID.match(digits):
        raise _fail("uuid", text)
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


_MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def days_from_civil(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 in the proleptic Gregorian calendar; year 0 is 1 BC."""
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if not 1 <= month <= 12 or not 1 <= day <= _MONTH_DAYS[month - 1] or (month == 2 and day == 29 and not leap):
        raise EvaluationError(f"date/time field value out of range: year={year} month={month} day={day}")
    shifted = year - (month <= 2)
    era, year_of_era = divmod(shifted, 400)
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719_468


def _infinite(text: str) -> float | None:
    word = text.strip().lower()
    if word == "infinity":
        return float("inf")
    return float("-inf") if word == "-infinity" else None


def read_date(text: str) -> int | float:
    infinite = _infinite(text)
    if infinite is not None:
        return infinite
    match = _DATE.match(text.strip())
    if not match:
        raise _fail("date", text)
    year = int(match[1])
    return days_from_civil(1 - year if match[4] else year, int(match[2]), int(match[3]))


def read_time(text: str) -> int:
    match = _TIME.match(text.strip())
    if not match:
        raise _fail("time", text)
    hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
    micros = int((match[4] or "").ljust(6, "0"))
    if hour > 24 or minute > 59 or second > 60 or (hour == 24 and (minute or second or micros)):
        raise EvaluationError(f'date/time field value out of range: "{text}"')
    return ((hour * 60 + minute) * 60 + second) * 1_000_000 + micros


def read_timestamp(text: str) -> int | float:
    """Without zone: a zone in the text is ignored, as PostgreSQL does."""
    return _read_moment(text, "timestamp")


def read_timestamptz(text: str) -> int | float:
    """Without a zone in the text the session's zone counts, which is UTC here."""
    return _read_moment(text, "timestamptz")


def _read_moment(text: str, name: str) -> int | float:
    infinite = _infinite(text)
    if infinite is not None:
        return infinite
    match = _MOMENT.match(text.strip())
    if not match:
        raise _fail(name, text)
    days = read_date(match[1] + (match[4] or "").upper())
    assert isinstance(days, int)
    micros = days * 86_400_000_000 + (read_time(match[2]) if match[2] else 0)
    zone = match[3]
    if zone and zone[0] in "+-" and name == "timestamptz":
        digits = zone[1:].replace(":", "")
        offset_minutes = int(digits[:2]) * 60 + int(digits[2:] or 0)
        micros -= (1 if zone[0] == "+" else -1) * offset_minutes * 60_000_000
    return micros


READERS: dict[str, Callable[[str], Value]] = {
    "bool": read_bool,
    "int2": _read_integer("int2"),
    "int4": _read_integer("int4"),
    "int8": _read_integer("int8"),
    "numeric": read_numeric,
    "float4": read_float4,
    "float8": read_float8,
    "text": read_text,
    "bpchar": read_text,
    "enum": read_text,
    "uuid": read_uuid,
    "date": read_date,
    "time": read_time,
    "timestamp": read_timestamp,
    "timestamptz": read_timestamptz,
}


def reader(type_: Type) -> Callable[[str], Value]:
    """The function that reads text of this type. Raises WhereError for types the evaluator does not know."""
    read = READERS.get(type_.name)
    if read is None:
        raise WhereError(f"type {type_} is not supported in a where clause.", fix="Cast the column to text.")
    if not type_.array:
        return read
    from tidemill.shapes.where.arrays import read_array

    return lambda text: read_array(text, read)
