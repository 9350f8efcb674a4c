"""PostgreSQL's intervals: months, days and microseconds, which stay separate except in comparisons. Pure.

Accepts ISO 8601 durations, as sessions print them under IntervalStyle iso_8601, and quantities with units and a time
(`1 year 2 mons -3 days 04:05:06.7`), as people write them. Other forms that PostgreSQL accepts (fractions of units
other than seconds, quantities without a unit) are rejected.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from tidemill.base.pgtypes.text import BLANKS, DAY_US, InvalidTextError

MONTH_DAYS = 30
"""Days of a month in comparisons."""


class Interval(NamedTuple):
    """An interval. `days` is ±inf for an infinite one."""

    months: int
    days: int | float
    micros: int


def interval_span(value: Interval) -> int | float:
    """Return the value by which intervals are compared, in microseconds."""
    return (value.months * MONTH_DAYS + value.days) * DAY_US + value.micros


def check_interval(months: int, days: int, micros: int) -> Interval:
    """Return the interval. Raises InvalidTextError if it is out of range."""
    if not (
        -(1 << 31) < months < (1 << 31) - 1 and -(1 << 31) < days < (1 << 31) - 1 and -(1 << 63) < micros < 1 << 63
    ):
        raise InvalidTextError("interval out of range")
    return Interval(months, days, micros)


_ISO = re.compile(
    r"P(?:([+-]?[0-9]{1,10})Y)?(?:([+-]?[0-9]{1,10})M)?(?:([+-]?[0-9]{1,10})W)?(?:([+-]?[0-9]{1,10})D)?"
    r"(?:T(?=.)(?:([+-]?[0-9]{1,10})H)?(?:([+-]?[0-9]{1,10})M)?(?:([+-]?)([0-9]{1,10})(?:\.([0-9]{1,6}))?S)?)?\Z"
)
_SECONDS = re.compile(r"[+-]?[0-9]{1,10}\Z")
_PART = re.compile(
    r"[ \t\n\r\f\v]*(?:([+-]?)([0-9]{1,10}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,6}))?)?"
    r"|([+-]?)([0-9]{1,10})(?:\.([0-9]{1,6}))?[ \t]*([a-z]+))(?=[ \t\n\r\f\v]|\Z|[+-])"
)
_UNITS = {
    "us": ("micros", 1), "microsecond": ("micros", 1),
    "ms": ("millis", 1_000), "millisecond": ("millis", 1_000),
    "s": ("second", 1_000_000), "sec": ("second", 1_000_000), "second": ("second", 1_000_000),
    "m": ("minute", 60_000_000), "min": ("minute", 60_000_000), "minute": ("minute", 60_000_000),
    "h": ("hour", 3_600_000_000), "hr": ("hour", 3_600_000_000), "hour": ("hour", 3_600_000_000),
    "d": ("day", 1), "day": ("day", 1), "w": ("week", 7), "week": ("week", 7),
    "mon": ("month", 1), "month": ("month", 1),
    "y": ("year", 12), "yr": ("year", 12), "year": ("year", 12), "decade": ("decade", 120),
}  # fmt: skip
_DAYS, _MONTHS = ("day", "week"), ("month", "year", "decade")
_INFINITE = {
    "infinity": Interval(0, math.inf, 0),
    "+infinity": Interval(0, math.inf, 0),
    "-infinity": Interval(0, -math.inf, 0),
}


def read_interval(text: str) -> Interval:
    """Parse an interval. Raises InvalidTextError."""
    word = text.strip(BLANKS)
    infinite = _INFINITE.get(word.lower())
    if infinite is not None:
        return infinite
    found = _ISO.match(word)
    if found and len(word) > 1:
        years, months, weeks, days, hours, minutes = (int(number or 0) for number in found.groups()[:6])
        seconds = _fraction(found[7], found[8] or "0", found[9])
        return check_interval(years * 12 + months, weeks * 7 + days, (hours * 60 + minutes) * 60_000_000 + seconds)
    if _SECONDS.match(word):
        return check_interval(0, 0, int(word) * 1_000_000)
    return _read_quantities(text, word.lower())


def _fraction(sign: str | None, whole: str, fraction: str | None, unit_us: int = 1_000_000) -> int:
    micros = int(whole) * unit_us + int((fraction or "").ljust(6, "0")) * unit_us // 1_000_000
    return -micros if sign == "-" else micros


def _read_quantities(text: str, word: str) -> Interval:
    months = days = micros = at = 0
    seen: set[str] = set()
    while at < len(word) or not seen:
        found = _PART.match(word, at)
        if found is None:
            raise _syntax(text)
        at = found.end()
        if found[9] is None:
            fields = {"hour", "minute", "second"}
            if int(found[3]) > 59 or int(found[4] or 0) > 59:
                raise _syntax(text)
            time_us = (int(found[2]) * 60 + int(found[3])) * 60_000_000 + _fraction("", found[4] or "0", found[5])
            micros += -time_us if found[1] == "-" else time_us
        else:
            unit = _UNITS.get(found[9]) or _UNITS.get(found[9].removesuffix("s"))
            if unit is None or (found[8] and unit[0] != "second"):
                raise _syntax(text)
            name, factor = unit
            fields = {name}
            amount = int(found[7]) * (-1 if found[6] == "-" else 1)
            if name in _MONTHS:
                months += amount * factor
            elif name in _DAYS:
                days += amount * factor
            else:
                micros += _fraction(found[6], found[7], found[8], factor)
        if fields & seen:
            raise _syntax(text)
        seen |= fields
    return check_interval(months, days, micros)


def _syntax(text: str) -> InvalidTextError:
    return InvalidTextError(f'invalid input syntax for type interval, or a form that is not supported: "{text}"')
