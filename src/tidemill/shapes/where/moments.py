"""Arithmetic on dates, times, timestamps and intervals, as PostgreSQL does it in the zone UTC.

A month is added by the calendar, and its last day stands for a day that it lacks; days and microseconds follow.
PostgreSQL's versions differ about infinite values, so evaluating them fails here and PostgreSQL is asked.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.base.pgintervals import Interval, checked
from tidemill.base.pgtext import DAY_US, DAYS, MOMENTS, days_of, month_days, ymd_of
from tidemill.shapes.where import casts
from tidemill.shapes.where.expressions import UNKNOWN, Expression, resolve, strict
from tidemill.shapes.where.operators import no_operator
from tidemill.shapes.where.types import EvaluationError, Type, Value, WhereError

KINDS = frozenset({"date", "time", "timestamp", "timestamptz", "interval"})


def takes(name: str, left: Expression, right: Expression) -> bool:
    return name in ("+", "-") and any(side.type.name in KINDS and not side.type.array for side in (left, right))


def arithmetic(name: str, left: Expression, right: Expression, location: str) -> Expression:
    """`left + right` or `left - right`, one of which is of KINDS. Raises WhereError."""
    left, right = _known(name, left, right, location), _known(name, right, left, location)
    if left.type.array or right.type.array:
        raise no_operator(name, left.type, right.type, location)
    a, b = (_general(side.type.name) for side in (left, right))
    if name == "-" and {a, b} <= {"date", "timestamp", "timestamptz"} and (a, b) != ("date", "date"):
        left, right = _as_moment(left), _as_moment(right)
        a = b = "timestamp"
    elif b == "interval" and a == "date":
        left, a = _as_moment(left), "timestamp"
    elif a == "interval" and b == "date" and name == "+":
        right, b = _as_moment(right), "timestamp"
    if name == "+" and (a, b) in _SWAPPED:
        left, right, a, b = right, left, b, a
    found = _FUNCTIONS.get((name, a, b))
    if found is None:
        raise no_operator(name, left.type, right.type, location)
    kind, function = found
    result = left.type.name if kind == "timestamp" and left.type.name == "timestamptz" else kind
    return Expression(Type(result), strict(function, left, right), constant=left.constant and right.constant)


def _known(name: str, side: Expression, other: Expression, location: str) -> Expression:
    """An unknown literal takes the other side's type if there is such an operator, else the only one that fits."""
    if side.type != UNKNOWN:
        return side
    kind = other.type.name
    if name == "+" and kind in ("time", "timestamp", "timestamptz"):
        return resolve(side, Type("interval"), location)
    if name == "+" and kind != "interval":
        raise WhereError(f"{location}operator is not unique: {kind} + unknown", fix="Cast the literal.")
    return resolve(side, other.type, location)


def _general(name: str) -> str:
    return {"int2": "int", "int4": "int", "timestamptz": "timestamp"}.get(name, name)


def _as_moment(side: Expression) -> Expression:
    if side.type.name != "date":
        return side
    return Expression(Type("timestamp"), strict(casts.to_moment, side), constant=side.constant)


def negate(value: Interval) -> Interval:
    return checked(-value.months, -_finite(value).days, -value.micros)


def _finite(value: Value) -> Value:
    days = value.days if isinstance(value, Interval) else value
    if isinstance(days, float):
        raise EvaluationError("arithmetic with infinite dates and intervals is PostgreSQL's own")
    return value


def _date_plus(days: Value, number: int) -> Value:
    if isinstance(days, float):
        return days
    if days + number not in DAYS:
        raise EvaluationError("date out of range")
    return days + number


def _date_minus(a: Value, b: Value) -> Value:
    if isinstance(a, float) or isinstance(b, float):
        raise EvaluationError("cannot subtract infinite dates")
    return a - b


def _in_range(micros: int) -> int:
    if micros not in MOMENTS:
        raise EvaluationError("timestamp out of range")
    return micros


def _moment_plus(micros: Value, interval: Interval) -> Value:
    _finite(interval)
    if isinstance(micros, float):
        return micros
    if interval.months:
        days, of_day = divmod(micros, DAY_US)
        year, month, day = ymd_of(days)
        year, month = divmod(year * 12 + month - 1 + interval.months, 12)
        days = days_of(year, month + 1, min(day, month_days(year, month + 1)))
        micros = _in_range(days * DAY_US + of_day)
    if interval.days:
        micros = _in_range(micros + int(interval.days) * DAY_US)
    return _in_range(micros + interval.micros)


def _moment_minus(a: Value, b: Value) -> Interval:
    micros = _finite(a) - _finite(b)
    if not -(1 << 63) <= micros < 1 << 63:
        raise EvaluationError("interval out of range")
    days = abs(micros) // DAY_US
    of_day = abs(micros) - days * DAY_US
    return checked(0, days, of_day) if micros >= 0 else checked(0, -days, -of_day)


def _interval_plus(a: Interval, b: Interval) -> Interval:
    return checked(a.months + b.months, _finite(a).days + _finite(b).days, a.micros + b.micros)


def _time_plus(micros: int, interval: Interval) -> int:
    return int((micros + _finite(interval).micros) % DAY_US)


def _date_at(days: Value, micros: int) -> Value:
    moment = casts.to_moment(days)
    return moment if isinstance(moment, float) else _in_range(moment + micros)


_FUNCTIONS: dict[tuple[str, str, str], tuple[str, Callable[..., Value]]] = {
    ("+", "date", "int"): ("date", _date_plus),
    ("-", "date", "int"): ("date", lambda a, b: _date_plus(a, -b)),
    ("-", "date", "date"): ("int4", _date_minus),
    ("+", "date", "time"): ("timestamp", _date_at),
    ("+", "timestamp", "interval"): ("timestamp", _moment_plus),
    ("-", "timestamp", "interval"): ("timestamp", lambda a, b: _moment_plus(a, negate(b))),
    ("-", "timestamp", "timestamp"): ("interval", _moment_minus),
    ("+", "time", "interval"): ("time", _time_plus),
    ("-", "time", "interval"): ("time", lambda a, b: _time_plus(a, negate(b))),
    ("-", "time", "time"): ("interval", lambda a, b: Interval(0, 0, a - b)),
    ("+", "interval", "interval"): ("interval", _interval_plus),
    ("-", "interval", "interval"): ("interval", lambda a, b: _interval_plus(a, negate(b))),
}
_SWAPPED = {(b, a) for name, a, b in _FUNCTIONS if name == "+"}
