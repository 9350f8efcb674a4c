"""Rows as JSON bytes for topics. In topics of rows, numbers, booleans and null are JSON values, everything else is
PostgreSQL's text.

    smallint integer bigint          JSON number, the digits of PostgreSQL's text
    real, double precision           JSON number; NaN and ±Infinity have none and are encoded as strings
    boolean                          true / false
    anything else                    JSON string (numeric, temporal, text, uuid, json, arrays, domains …)
    NULL                             null

In topics of change events every type has the form that `base/pgtypes/debezium` defines. In a key −0 of a float is 0,
because PostgreSQL has one key for both: its records stay in one partition, in their order.

One encoder per relation: names are escaped once, and a row costs one join.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tidemill.base.pgtypes.debezium import escape, json_writer, value_form
from tidemill.capture.changes import Column, Relation, Row

Form = Callable[[Column], str]
_JSON_FORMS = {16: "bool", 20: "number", 21: "number", 23: "number", 700: "float", 701: "float"}
MINUS_ZERO = "-0"


def row_form(column: Column) -> str:
    return _JSON_FORMS.get(column.type_oid, "text")


def event_form(column: Column) -> str:
    return value_form(column.type_oid, column.type_mod)


def _format_key_float(text: str) -> str:
    return "0" if text == MINUS_ZERO else json_writer("float")(text)


class RowEncoder:
    """Encoder of one relation. `key(row)`: object of the key columns in key order. `value(row)`: object of the columns
    in table order.
    """

    def __init__(self, relation: Relation, form: Form = row_form) -> None:
        self.relation = relation
        self._value = _plan_columns(relation.columns, form)
        self._key = _plan_columns(relation.key_columns, form, of_key=True)

    def key(self, row: Row) -> bytes:
        return _encode_object(self._key, row)

    def value(self, row: Row, without: Collection[str] = ()) -> bytes:
        """Encode a row. `without`: columns that have no value (Change.unchanged)."""
        plan = [each for each in self._value if each[0] not in without] if without else self._value
        return _encode_object(plan, row)


_Plan = list[tuple[str, str, Callable[[str], str]]]


def _plan_columns(columns: Sequence[Column], form: Form, *, of_key: bool = False) -> _Plan:
    def value_formatter(column: Column) -> Callable[[str], str]:
        found = form(column)
        return _format_key_float if of_key and found == "float" else json_writer(found)

    return [(c.name, f"{escape(c.name)}:", value_formatter(c)) for c in columns]


def _encode_object(plan: _Plan, row: Row) -> bytes:
    parts = []
    for name, prefix, encode in plan:
        text = row[name]
        parts.append(f"{prefix}null" if text is None else prefix + encode(text))
    return ("{" + ",".join(parts) + "}").encode()
