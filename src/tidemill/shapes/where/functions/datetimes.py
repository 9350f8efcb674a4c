"""Arithmetic on dates, times, timestamps and intervals, as PostgreSQL does it in the zone UTC.

Months are added by the calendar; a day that the resulting month lacks becomes its last day. Days and microseconds are
added after that. PostgreSQL's versions differ about infinite values, so evaluating them fails here and PostgreSQL
evaluates the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tidemill.base.pgtypes.intervals import MONTH_DAYS, Interval, check_interval
from tidemill.base.pgtypes.text import DAY_US, DAYS, MOMENTS, days_of, month_days, ymd_of
from tidemill.shapes.where import casts
from tidemill.shapes.where.expressions import UNKNOWN, Expression, resolve_unknown, strict
from tidemill.shapes.where.operators import operator_error
from tidemill.shapes.where.types import NUMBERS, EvaluationError, Type, Value, WhereError

DATETIME_KINDS = frozenset({"date", "time", "timestamp", "timestamptz", "interval"})


def is_datetime_operator(name: str, left: Expression, right: Expression) -> bool:
    kinds = {side.type.name for side in (left, right) if not side.type.array}
    return bool(kinds & DATETIME_KINDS) if name in ("+", "-") else name in ("*", "/") and "interval" in kinds


def compile_arithmetic(name: str, left: Expression, right: Expression, location: str) -> Expression:
    """Compile `left + right` or `left - right`, one of which is of KINDS; or an interval times or divided by a number.

    Raises WhereError.
    """
    if name in ("*", "/"):
        return _compile_scaling(name, left, right, location)
    left, right = _resolve_literal(name, left, right, location), _resolve_literal(name, right, left, location)
    if left.type.array or right.type.array:
        raise operator_error(name, left.type, right.type, location)
    a, b = (_general_kind(side.type.name) for side in (left, right))
    if name == "-" and {a, b} <= {"date", "timestamp", "timestamptz"} and (a, b) != ("date", "date"):
        left, right = _as_timestamp(left), _as_timestamp(right)
        a = b = "timestamp"
    elif b == "interval" and a == "date":
        left, a = _as_timestamp(left), "timestamp"
    elif a == "interval" and b == "date" and name == "+":
        right, b = _as_timestamp(right), "timestamp"
    if name == "+" and (a, b) in _SWAPPED:
        left, right, a, b = right, left, b, a
    found = _FUNCTIONS.get((name, a, b))
    if found is None:
        raise operator_error(name, left.type, right.type, location)
    kind, function = found
    result = left.type.name if kind == "timestamp" and left.type.name == "timestamptz" else kind
    return Expression(Type(result), strict(function, left, right), constant=left.constant and right.constant)


def _compile_scaling(name: str, left: Expression, right: Expression, location: str) -> Expression:
    """Compile an interval times or divided by a number, which is always converted to double precision."""
    if name == "*" and right.type == Type("interval"):
        left, right = right, left
    number = resolve_unknown(right, Type("float8"), location)
    if left.type != Type("interval") or number.type.array or number.type.name not in NUMBERS:
        raise operator_error(name, left.type, right.type, location)
    factor = casts.compile_cast(number, Type("float8"), location)
    function = strict(_interval_times if name == "*" else _interval_divided, left, factor)
    return Expression(left.type, function, constant=left.constant and right.constant)


def compile_call(name: str, operands: Sequence[Expression], location: str) -> Expression:
    """Compile one of FUNCTIONS. Raises WhereError."""
    kinds = ", ".join(str(operand.type) for operand in operands)
    known = [resolve_unknown(operand, Type("interval"), location) for operand in operands]
    if [each.type for each in known] != [Type("interval")]:
        raise WhereError(f"{location}function {name}({kinds}) does not exist", fix="Cast.")
    return Expression(Type("interval"), strict(_JUSTIFIED[name], known[0]), constant=known[0].constant)


def _resolve_literal(name: str, side: Expression, other: Expression, location: str) -> Expression:
    """Resolve an unknown literal to the other side's type if there is such an operator, else to the only type that
    fits."""
    if side.type != UNKNOWN:
        return side
    kind = other.type.name
    if name == "+" and kind in ("time", "timestamp", "timestamptz"):
        return resolve_unknown(side, Type("interval"), location)
    if name == "+" and kind != "interval":
        raise WhereError(f"{location}operator is not unique: {kind} + unknown", fix="Cast the literal.")
    return resolve_unknown(side, other.type, location)


def _general_kind(name: str) -> str:
    return {"int2": "int", "int4": "int", "timestamptz": "timestamp"}.get(name, name)


def _as_timestamp(side: Expression) -> Expression:
    if side.type.name != "date":
        return side
    return Expression(Type("timestamp"), strict(casts.date_to_timestamp, side), constant=side.constant)


def negate_interval(value: Interval) -> Interval:
    return check_interval(-value.months, -_require_finite(value).days, -value.micros)


def _require_finite(value: Value) -> Value:
    days = value.days if isinstance(value, Interval) else value
    if isinstance(days, float):
        raise EvaluationError("arithmetic with infinite dates and intervals is not supported")
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


def _check_timestamp(micros: int) -> int:
    if micros not in MOMENTS:
        raise EvaluationError("timestamp out of range")
    return micros


def _timestamp_plus(micros: Value, interval: Interval) -> Value:
    _require_finite(interval)
    if isinstance(micros, float):
        return micros
    if interval.months:
        days, of_day = divmod(micros, DAY_US)
        year, month, day = ymd_of(days)
        year, month = divmod(year * 12 + month - 1 + interval.months, 12)
        days = days_of(year, month + 1, min(day, month_days(year, month + 1)))
        micros = _check_timestamp(days * DAY_US + of_day)
    if interval.days:
        micros = _check_timestamp(micros + int(interval.days) * DAY_US)
    return _check_timestamp(micros + interval.micros)


def _timestamp_minus(a: Value, b: Value) -> Interval:
    micros = _require_finite(a) - _require_finite(b)
    if not -(1 << 63) <= micros < 1 << 63:
        raise EvaluationError("interval out of range")
    days = abs(micros) // DAY_US
    of_day = abs(micros) - days * DAY_US
    return check_interval(0, days, of_day) if micros >= 0 else check_interval(0, -days, -of_day)


def _interval_plus(a: Interval, b: Interval) -> Interval:
    return check_interval(a.months + b.months, _require_finite(a).days + _require_finite(b).days, a.micros + b.micros)


def _time_plus(micros: int, interval: Interval) -> int:
    return int((micros + _require_finite(interval).micros) % DAY_US)


def _date_plus_time(days: Value, micros: int) -> Value:
    moment = casts.date_to_timestamp(days)
    return moment if isinstance(moment, float) else _check_timestamp(moment + micros)


def _interval_times(value: Interval, factor: float) -> Interval:
    _require_finite(value)
    return _interval_of_fractions(*(part * factor for part in value))


def _interval_divided(value: Interval, divisor: float) -> Interval:
    if divisor == 0:
        raise EvaluationError("division by zero")
    _require_finite(value)
    return _interval_of_fractions(*(part / divisor for part in value))


def _interval_of_fractions(months: float, days: float, micros: float) -> Interval:
    """Build an interval from fractional parts: fractions of months become days, 30 per month, and fractions of days
    microseconds. Both are first rounded to a millionth."""
    if not (abs(months) <= _INT4_MAX and abs(days) <= _INT4_MAX and abs(micros) <= _INT8_MAX):  # false for NaN too
        raise EvaluationError("interval out of range")
    whole_months, whole_days = int(months), int(days)
    month_days = _to_micro((months - whole_months) * MONTH_DAYS)
    seconds = _to_micro((days - whole_days + month_days - int(month_days)) * _DAY_S)
    carried = int(seconds / _DAY_S) if abs(seconds) >= _DAY_S else 0
    seconds -= carried * _DAY_S
    return check_interval(whole_months, whole_days + carried + int(month_days), round(micros + seconds * 1e6))


def _to_micro(value: float) -> float:
    return float(round(value * 1e6)) / 1e6


def _towards_zero(amount: int, unit: int) -> int:
    return amount // unit if amount >= 0 else -(-amount // unit)


def _carry(amount: int, unit: int, above: int) -> tuple[int, int]:
    """Move whole units from `amount` to `above`; return (above, remainder)."""
    whole = _towards_zero(amount, unit)
    return above + whole, amount - whole * unit


def _align_signs(above: int, amount: int, unit: int, sign: int) -> tuple[int, int]:
    """Give both parts the same sign. `sign`: the sign of the parts below `above`."""
    if above > 0 and sign < 0:
        return above - 1, amount + unit
    return (above + 1, amount - unit) if above < 0 and sign > 0 else (above, amount)


def _justify_hours(value: Interval) -> Interval:
    if math.isinf(value.days):
        return value
    days, micros = _carry(value.micros, DAY_US, int(value.days))
    check_interval(value.months, days, micros)
    return check_interval(value.months, *_align_signs(days, micros, DAY_US, micros))


def _justify_days(value: Interval) -> Interval:
    if math.isinf(value.days):
        return value
    months, days = _carry(int(value.days), MONTH_DAYS, value.months)
    check_interval(months, days, value.micros)
    return check_interval(*_align_signs(months, days, MONTH_DAYS, days), value.micros)


def _justify_interval(value: Interval) -> Interval:
    if math.isinf(value.days):
        return value
    days, micros = _carry(value.micros, DAY_US, int(value.days))
    check_interval(value.months, days, micros)
    months, days = _carry(days, MONTH_DAYS, value.months)
    check_interval(months, days, micros)
    months, days = _align_signs(months, days, MONTH_DAYS, days or micros)
    return check_interval(months, *_align_signs(days, micros, DAY_US, micros))


_JUSTIFIED = {
    "justify_hours": _justify_hours,
    "justify_days": _justify_days,
    "justify_interval": _justify_interval,
}
FUNCTIONS = tuple(_JUSTIFIED)
_DAY_S = 86_400
_INT4_MAX, _INT8_MAX = (1 << 31) - 1, (1 << 63) - 1025  # the largest double below 2^63
_FUNCTIONS: dict[tuple[str, str, str], tuple[str, Callable[..., Value]]] = {
    ("+", "date", "int"): ("date", _date_plus),
    ("-", "date", "int"): ("date", lambda a, b: _date_plus(a, -b)),
    ("-", "date", "date"): ("int4", _date_minus),
    ("+", "date", "time"): ("timestamp", _date_plus_time),
    ("+", "timestamp", "interval"): ("timestamp", _timestamp_plus),
    ("-", "timestamp", "interval"): ("timestamp", lambda a, b: _timestamp_plus(a, negate_interval(b))),
    ("-", "timestamp", "timestamp"): ("interval", _timestamp_minus),
    ("+", "time", "interval"): ("time", _time_plus),
    ("-", "time", "interval"): ("time", lambda a, b: _time_plus(a, negate_interval(b))),
    ("-", "time", "time"): ("interval", lambda a, b: Interval(0, 0, a - b)),
    ("+", "interval", "interval"): ("interval", _interval_plus),
    ("-", "interval", "interval"): ("interval", lambda a, b: _interval_plus(a, negate_interval(b))),
}
_SWAPPED = {(b, a) for name, a, b in _FUNCTIONS if name == "+"}
