"""Values in PostgreSQL's text form, one rule per type: the result of PostgreSQL's own input function. Pure.

    bool              bool
    int2 int4 int8    int, checked against the type's range
    numeric           Decimal (NaN and infinities included)
    float4 float8     float (float4 rounded to single precision)
    uuid              str, canonical lower case: its order is the byte order
    bytea             bytes, from the hex format
    date              days since 1970-01-01;  ±inf
    time              microseconds of the day
    timestamp(tz)     microseconds since 1970-01-01 UTC;  ±inf
    arrays            nested lists, None for NULL (`arrays`)
    anything else     its text

Accepts everything that sessions print under DateStyle ISO, bytea_output hex and TimeZone UTC, and the usual notations
of people. Rejects the special words of the input functions (`now`, `Jan 8`, `0x1F`, `1_000`). Digits and blanks are
those of ASCII. A text that is not accepted raises `InvalidTextError` with PostgreSQL's message. Arrow reads columns of
ordinary values (`shards/parts/pg_columns`), with the same values for the same text; these functions read the rest.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

INTEGERS = {"int2": 1 << 15, "int4": 1 << 31, "int8": 1 << 63}

INTEGER_DIGITS = 100
"""Length limit including sign, blanks and leading zeros. PostgreSQL has none, but no real number is this long."""

NUMERIC_DIGITS = 16_000
"""Digits on either side of the point above which a number is rejected.

PostgreSQL accepts more (131,072 and 16,383), but one operation on such numbers must not cost the event loop more than a
few milliseconds.
"""

DAY_US = 86_400_000_000
DAYS = range(-2_440_588, 2_145_042_906)
"""Dates from 4714-11-24 BC to 5874897-12-31."""
MOMENTS = range(-210_866_803_200_000_000, 9_224_318_016_000_000_000)
"""Timestamps from 4714-11-24 BC to the end of the year 294276, which is beyond 2⁶³ µs after 1970."""

DISPLAY = {
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
"""Names of types in PostgreSQL's messages."""

BLANKS = " \t\n\r\f\v"
_INT = re.compile(r"[ \t\n\r\f\v]*[+-]?[0-9]+[ \t\n\r\f\v]*\Z")
_NUMERIC = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\Z")
_NONZERO = re.compile(r"[+-]?[0.]*[1-9]")
_DATE = re.compile(r"([0-9]{4,7})-([0-9]{1,2})-([0-9]{1,2})( BC)?\Z", re.IGNORECASE)
_TIME = re.compile(r"([0-9]{1,2}):([0-9]{1,2})(?::([0-9]{1,2})(\.[0-9]*)?)?\Z")
_MOMENT = re.compile(
    r"([0-9]{4,7}-[0-9]{1,2}-[0-9]{1,2})(?:[ T]([0-9]{1,2}:[0-9]{1,2}(?::[0-9]{1,2}(?:\.[0-9]*)?)?))?"
    r" ?(Z|UTC|([+-])([0-9]{1,2})(?::?([0-9]{2}))?(?::?([0-9]{2}))?)?( BC)?\Z",
    re.IGNORECASE,
)
_UUID = re.compile(r"(\{)?((?:[0-9a-f]{4}-?){7}[0-9a-f]{4})(?(1)\})\Z")
_SPECIAL = {
    "nan": "nan",
    "inf": "inf",
    "infinity": "inf",
    "+inf": "inf",
    "+infinity": "inf",
    "-inf": "-inf",
    "-infinity": "-inf",
}
_INFINITE = {"infinity": math.inf, "+infinity": math.inf, "-infinity": -math.inf}
_MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


class InvalidTextError(ValueError):
    """The text is not a value of its type, or the value is out of range: PostgreSQL raises an error here."""


def _syntax(type_name: str, text: str) -> InvalidTextError:
    return InvalidTextError(f'invalid input syntax for type {DISPLAY.get(type_name, type_name)}: "{text}"')


def _field(text: str) -> InvalidTextError:
    return InvalidTextError(f'date/time field value out of range: "{text}"')


def read_text(text: str) -> str:
    return text


def read_bool(text: str) -> bool:
    word = text.strip(BLANKS).lower()
    if word and ("true".startswith(word) or "yes".startswith(word) or word in ("on", "1")):
        return True
    if word and ("false".startswith(word) or "no".startswith(word) or word in ("of", "off", "0")):
        return False
    raise _syntax("bool", text)


def check_integer(name: str, value: int) -> int:
    bound = INTEGERS[name]
    if not -bound <= value < bound:
        raise InvalidTextError(f"{DISPLAY[name]} out of range")
    return value


def _read_integer(name: str) -> Callable[[str], int]:
    looks, bound = _INT.match, INTEGERS[name]

    def read(text: str) -> int:
        if not looks(text):
            raise _syntax(name, text)
        if len(text) > INTEGER_DIGITS:  # Python rejects very long ones
            raise InvalidTextError(f"{DISPLAY[name]} out of range")
        value = int(text)
        return value if -bound <= value < bound else check_integer(name, value)

    return read


def read_numeric(text: str) -> Decimal:
    word = text.strip(BLANKS)
    special = _SPECIAL.get(word.lower())
    if special is not None:
        return Decimal(special)
    if not _NUMERIC.match(word):
        raise _syntax("numeric", text)
    if len(word) > 2 * NUMERIC_DIGITS:
        raise too_many_digits_error()
    try:
        return check_numeric(Decimal(word))
    except InvalidOperation as error:  # an exponent beyond any limit
        raise too_many_digits_error() from error


def too_many_digits_error() -> InvalidTextError:
    return InvalidTextError(f"a number of more than {NUMERIC_DIGITS} digits is not supported")


def check_numeric(value: Decimal) -> Decimal:
    if value and value.is_finite() and not -NUMERIC_DIGITS <= value.adjusted() <= NUMERIC_DIGITS:
        raise too_many_digits_error()
    return value


def read_float8(text: str) -> float:
    word = text.strip(BLANKS)
    special = _SPECIAL.get(word.lower())
    if special is not None:
        return float(special)
    if not _NUMERIC.match(word):
        raise _syntax("float8", text)
    value = float(word)
    if math.isinf(value) or (value == 0 and _NONZERO.match(word)):
        raise InvalidTextError(f'"{text}" is out of range for type double precision')
    return value


def to_float4(value: float) -> float:
    try:
        result = float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError as error:
        raise InvalidTextError("value out of range: overflow") from error
    if result == 0 and value != 0:
        raise InvalidTextError("value out of range: underflow")
    return result


def read_float4(text: str) -> float:
    """Parse a float4, rounding once: a double halfway between two singles does not show on which side of it the text
    is.
    """
    value = read_float8(text)
    return value if math.isnan(value) or math.isinf(value) else nearest_float4(Decimal(text.strip(BLANKS)), value)


def nearest_float4(exact: Decimal | int, value: float) -> float:
    """Return the single nearest to `exact`, whose nearest double is `value`. Raises InvalidTextError."""
    near = to_float4(value)
    if near == value or value == exact:
        return near
    bits = struct.unpack("<i", struct.pack("<f", near))[0]
    outward = (value > near) is (near >= 0) if near else True
    other = struct.unpack("<f", struct.pack("<i", bits + (1 if outward else -1)))[0]
    if (near + other) / 2 != value:
        return near
    low, high = sorted((near, float(other)))
    return high if exact > Decimal(value) else low


def read_uuid(text: str) -> str:
    found = _UUID.match(text.lower())
    if not found:
        raise _syntax("uuid", text)
    digits = found[2].replace("-", "")
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def read_bytea(text: str) -> bytes:
    if not text.startswith("\\x"):
        raise InvalidTextError(f'bytea is read in the hex format only: "{text}"')
    try:
        return bytes.fromhex(text[2:])
    except ValueError as error:
        raise _syntax("bytea", text) from error


def days_of(year: int, month: int, day: int) -> int:
    """Return days since 1970-01-01 in the proleptic Gregorian calendar, by eras of 400 years; 1 BC is year 0."""
    era, year_of_era = divmod(year - (month <= 2), 400)
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719_468


def ymd_of(days: int) -> tuple[int, int, int]:
    """Return year, month and day of a date, the inverse of `days_of`."""
    era, of_era = divmod(days + 719_468, 146_097)
    year = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    day = of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    return era * 400 + year + (month <= 2), month, day


def month_days(year: int, month: int) -> int:
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    return 28 if month == 2 and not leap else _MONTH_DAYS[month - 1]


def _days(text: str, year: int, month: int, day: int, bc: bool) -> int:
    """Return days since 1970-01-01 in the proleptic Gregorian calendar, by eras of 400 years; there is no year 0."""
    if not year:
        raise _field(text)
    year = 1 - year if bc else year
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if not 1 <= month <= 12 or not 1 <= day <= _MONTH_DAYS[month - 1] or (month == 2 and day == 29 and not leap):
        raise _field(text)
    days = days_of(year, month, day)
    if days not in DAYS:
        raise InvalidTextError(f'date out of range: "{text}"')
    return days


def read_date(text: str) -> int | float:
    word = text.strip(BLANKS)
    infinite = _INFINITE.get(word.lower())
    if infinite is not None:
        return infinite
    found = _DATE.match(word)
    if not found:
        raise _syntax("date", text)
    return _days(text, int(found[1]), int(found[2]), int(found[3]), found[4] is not None)


def read_time(text: str) -> int:
    found = _TIME.match(text.strip(BLANKS))
    if not found:
        raise _syntax("time", text)
    hour, minute = int(found[1]), int(found[2])
    second_us = int(found[3] or 0) * 1_000_000 + round(float(f"0{found[4] or ''}") * 1_000_000)
    micros = (hour * 60 + minute) * 60_000_000 + second_us
    if minute > 59 or second_us > 60_000_000 or micros > DAY_US:
        raise _field(text)
    return micros


def read_timestamp(text: str) -> int | float:
    """Parse a timestamp without a zone: a zone in the text is ignored, as PostgreSQL does."""
    return _read_moment(text, "timestamp")


def read_timestamptz(text: str) -> int | float:
    """Parse a timestamp with a zone. A text without one is in the session's zone, which is UTC here."""
    return _read_moment(text, "timestamptz")


def has_zone(text: str) -> bool:
    """Return whether the text is a timestamp with a zone."""
    found = _MOMENT.match(text.strip(BLANKS))
    return found is not None and found[3] is not None


def _read_moment(text: str, name: str) -> int | float:
    word = text.strip(BLANKS)
    infinite = _INFINITE.get(word.lower())
    if infinite is not None:
        return infinite
    found = _MOMENT.match(word)
    if not found:
        raise _syntax(name, text)
    day, time, _, sign, hours, minutes, seconds, bc = found.groups()
    year, month, of_month = day.split("-")
    micros = _days(text, int(year), int(month), int(of_month), bc is not None) * DAY_US
    micros += read_time(time) if time else 0
    if sign:
        hour, minute, second = int(hours), int(minutes or 0), int(seconds or 0)
        if hour > 15 or minute > 59 or second > 59:
            raise InvalidTextError(f'time zone displacement out of range: "{text}"')
        if name == "timestamptz":
            micros -= (1 if sign == "+" else -1) * ((hour * 60 + minute) * 60 + second) * 1_000_000
    if micros not in MOMENTS:
        raise InvalidTextError(f'timestamp out of range: "{text}"')
    return micros


READERS: dict[str, Callable[[str], Any]] = {
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
