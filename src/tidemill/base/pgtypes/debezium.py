"""Values of change events: PostgreSQL's text ⇄ JSON as Debezium writes it, one form per type. Pure.

The row envelope uses the same forms. A form is fixed for existing topics: Avro schemas are registered from it.

With decimal.handling.mode=string and time.precision.mode=adaptive:

    form           types                          JSON
    number         smallint integer bigint oid    number
    float          real, double precision         number; NaN and ±Infinity are strings
    bool           boolean                        true, false
    days           date                           number: days since 1970-01-01
    millis         timestamp(0) to (3)            number: milliseconds since 1970-01-01, its digits read as UTC
    micros         timestamp                      number: microseconds since then
    clock_millis   time(0) to (3)                 number: milliseconds of the day
    clock_micros   time                           number: microseconds of the day
    zoned          timestamp with time zone       string: ISO 8601 in UTC
    hex            bytea                          string: hexadecimal digits (binary.handling.mode=hex)
    text           everything else                string: PostgreSQL's text unchanged

Infinities are the numbers that Debezium gets from PostgreSQL's JDBC driver; for a date, ±(2³¹−1). Every form is
reversible, to the text or to one with the same value.
"""

from __future__ import annotations

from collections.abc import Callable
from json.encoder import encode_basestring

from tidemill.base.pgtypes.text import InvalidTextError, read_date, read_time, read_timestamp

escape: Callable[[str], str] = encode_basestring

_BY_OID = {
    16: "bool",
    17: "hex",
    20: "number",
    21: "number",
    23: "number",
    26: "number",
    700: "float",
    701: "float",
    1082: "days",
    1083: "clock_micros",
    1114: "micros",
    1184: "zoned",
}
_SHORT = {"micros": "millis", "clock_micros": "clock_millis"}
MILLIS_DIGITS = 3
"""Maximum precision, in digits of a second, of a time or timestamp that is written in milliseconds."""
NUMBERS = frozenset({"days", "millis", "micros", "clock_millis", "clock_micros"})
"""Forms that represent other values as numbers."""
MILLIS = frozenset({"millis", "clock_millis"})
CLOCKS = frozenset({"clock_millis", "clock_micros"})
NOT_JSON_NUMBERS = frozenset({"NaN", "Infinity", "-Infinity"})

DATE_INFINITY = 2**31 - 1
INFINITY, MINUS_INFINITY = 9_223_372_036_825_200_000, -9_223_372_036_832_400_000
"""Infinite timestamps: µs without a zone; ms with a zone, which are these texts."""
ZONED_INFINITY, ZONED_MINUS_INFINITY = "+292278994-08-16T23:00:00Z", "-292275055-05-16T23:00:00Z"
UTC = "+00"
"""Suffix of every timestamp with time zone that a session in UTC prints."""


def value_form(type_oid: int, type_mod: int) -> str:
    form = _BY_OID.get(type_oid, "text")
    return _SHORT[form] if form in _SHORT and 0 <= type_mod <= MILLIS_DIGITS else form


def json_writer(form: str) -> Callable[[str], str]:
    """Return the conversion from PostgreSQL's text to JSON.

    It raises InvalidTextError for a text that is no such value.
    """
    return _WRITTEN.get(form, escape)


def string_writer(form: str) -> Callable[[str], str]:
    """Return the conversion from PostgreSQL's text to the content of a JSON string, without quotes and escapes."""
    return _PLAIN.get(form, _identity)


def _identity(text: str) -> str:
    return text


def _number(text: str) -> str:
    return text


def _float(text: str) -> str:
    return f'"{text}"' if text in NOT_JSON_NUMBERS else text


def _bool(text: str) -> str:
    if not text:
        raise InvalidTextError('invalid input syntax for type boolean: ""')
    return "true" if text[0] == "t" else "false"


def _digits(text: str) -> str:
    return text.removeprefix("\\x")


def _hex(text: str) -> str:
    return escape(_digits(text))


def _days(text: str) -> str:
    days = read_date(text)
    return str(days if isinstance(days, int) else DATE_INFINITY if days > 0 else -DATE_INFINITY)


def _micros(text: str) -> str:
    micros = read_timestamp(text)
    return str(micros if isinstance(micros, int) else INFINITY if micros > 0 else MINUS_INFINITY)


def _millis(text: str) -> str:
    return str(int(_micros(text)) // 1000)


def _clock_micros(text: str) -> str:
    return str(read_time(text))


def _clock_millis(text: str) -> str:
    return str(read_time(text) // 1000)


def _zoned(text: str) -> str:
    return escape(_iso(text))


def _iso(text: str) -> str:
    if not text.isascii() or not text.isprintable() or '"' in text:
        return text  # not a timestamp
    if text in ("infinity", "-infinity"):
        return ZONED_INFINITY if text == "infinity" else ZONED_MINUS_INFINITY
    whole = text.removesuffix(" BC")
    moment, zone = whole[: -len(UTC)], whole[-len(UTC) :]
    day, blank, clock = moment.partition(" ")
    if zone != UTC or not blank:
        return text  # not from a session in UTC: unchanged
    year, dash, rest = day.partition("-")
    if whole != text:
        before = int(year) - 1  # 1 BC is the year 0
        year = f"-{before:04}" if before else "0000"
    elif len(year) > 4:
        year = f"+{year}"
    return f"{year}{dash}{rest}T{clock}Z"


_WRITTEN: dict[str, Callable[[str], str]] = {
    "number": _number,
    "float": _float,
    "bool": _bool,
    "hex": _hex,
    "days": _days,
    "millis": _millis,
    "micros": _micros,
    "clock_millis": _clock_millis,
    "clock_micros": _clock_micros,
    "zoned": _zoned,
}


_PLAIN: dict[str, Callable[[str], str]] = {"hex": _digits, "zoned": _iso}


def clock_text(micros: int) -> str:
    """Return a time of day as PostgreSQL prints it. Raises ValueError beyond a day."""
    if not 0 <= micros <= 86_400_000_000:
        raise ValueError(f"not a time of day: us={micros}")
    seconds, fraction = divmod(micros, 1_000_000)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text


def zoned_text(iso: str) -> str:
    """Return a timestamp with time zone as PostgreSQL prints it."""
    if iso in (ZONED_INFINITY, ZONED_MINUS_INFINITY):
        return "infinity" if iso == ZONED_INFINITY else "-infinity"
    moment = iso.removesuffix("Z")
    day, mark, clock = moment.partition("T")
    if moment == iso or not mark:
        return iso
    if day.startswith("-") or day.startswith("0000-"):
        year, _, rest = day.removeprefix("-").partition("-")
        return f"{int(year) + 1:04}-{rest} {clock}{UTC} BC"
    return f"{day.removeprefix('+')} {clock}{UTC}"
