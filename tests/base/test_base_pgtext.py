"""The text parsers accept and reject the same texts as PostgreSQL and read the same values, checked against a real
server.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from tidemill.base.pgtypes.arrays import ARRAY_CHARS, read_array
from tidemill.base.pgtypes.debezium import json_writer
from tidemill.base.pgtypes.text import READERS, InvalidTextError, read_bytea
from tidemill.capture.postgres.connection import DISPLAY_SETTINGS

DAYS = "CASE WHEN isfinite(v::date) THEN (v::date - DATE '1970-01-01')::text ELSE v::date::text END"
MICROS = (
    "CASE WHEN isfinite(v::{0}) THEN trunc((v::{0}::date - DATE '1970-01-01') * 86400000000::numeric"
    " + extract(epoch FROM v::{0}::time) * 1000000)::text ELSE v::{0}::text END"
)

NUMBERS = (
    "0 -0 +7 007 32767 32768 -32768 2147483648 9223372036854775808 -9223372036854775808 1. .5 1.5 1e3 1e-3 1E+2 . e5"
)
NUMBERS += (
    " 1e400 1e-400 -1e39 1e39 1e-46 4.9e-324 NaN nan inf -Infinity +infinity --1 1-1 ٣ 1٣ x 1e٣ 12345678901234567890.5"
)
MOMENTS = (
    "2026-02-28|2026-02-29|2024-02-29|2026-02-31|2026-13-01|2026-00-01|2026-01-00|0000-01-01|0001-01-01|0001-01-01 BC"
    "|0000-01-01 BC|4714-11-24 BC|4714-11-23 BC|4713-01-01 bc|5874897-12-31|5874898-01-01|294276-12-31|294277-01-01"
    "|infinity|-infinity|+infinity|INFINITY|٢026-01-01| 2026-1-2 |2026-01-02 BC x|1900-02-29|2000-02-29|9999-12-31"
)
CLOCKS = (
    "00:00|24:00|24:00:00|24:00:01|24:01|25:00|23:60|23:59:60|23:59:61|23:59:60.5|23:59:59.9999999|1:02|10:20:30."
    "|10:20:30.5|10:20:30.123456|10:20:30.1234567|10:20:30.1234565|10:20:30.1234575|10:2|10:20:30:4|٠0:00"
)
ZONES = "|+00|-00|Z|z| UTC|+05:30|-0530|+5|+530|+00:53:28|-12:34:56|+15:59|+16|+05:60|-15:59:59|+05:30:60"
UUIDS = (
    "00000000-0000-0000-0000-000000000001|{12345678123412341234-1234567890AB}|1234-5678-1234-1234-1234-1234-5678-90ab"
    "|12345678123412341234123456789 0ab|{12345678-1234-1234-1234-1234567890ab|12345678-1234-1234-1234-1234567890ab}"
    "|1-2345678123412341234-1234567890ab|12345678-1234-1234-1234-1234567890ab-| 12345678-1234-1234-1234-1234567890ab"
    "|12345678--1234-1234-1234-1234567890ab|١2345678-1234-1234-1234-1234567890ab"
)
ARRAYS = (
    '{}| { } |{1}|{1,2}| {1 , 2 } |{1,NULL,null}|{{1,2},{3,4}}|{1,}|{,1}|{,}|{|}|1|{1}}|{1}{2}|{1},{2}|{1 2}|{"1"}'
    '|{"1"2}|{1"2"}|[0:1]={1,2}|[1:1][1:2]={{1,2}}|[1]={1}|={1}|{"1}|{1\\|{"NULL"}|{{{{{{1}}}}}}|{{{{{{{1}}}}}}}'
)
BYTES = "\\x|\\x00ff|\\xDEADbeef|\\x0|\\xzz|\\x 00 ff|\\x0 0|\\x٠٠"
WORDS = "t|f|true|FALSE|tru|fals|y|n|yes|no|ye|on|of|off|o|1|0|01|11| t |\u00a0t||truest|نعم"

TYPES: list[tuple[str, str, str, list[str]]] = [
    ("bool", "bool", "v::bool::text", WORDS.split("|")),
    *((name, name, f"v::{name}::text", [*NUMBERS.split(), " 1 ", "\u00a01", "1\u2003"]) for name in
      ("int2", "int4", "int8", "numeric", "float4", "float8")),
    ("uuid", "uuid", "v::uuid::text", UUIDS.split("|")),
    ("date", "date", DAYS, MOMENTS.split("|")),
    ("time", "time", "trunc(extract(epoch FROM v::time) * 1000000)::text", CLOCKS.split("|")),
    *((name, name, MICROS.format(name), [
        *MOMENTS.split("|"),
        *(f"2026-11-21 {clock}{zone}" for clock in CLOCKS.split("|") for zone in ("", "+01", "+00 BC")),
        *(f"1999-12-31T23:59:59.5{zone}" for zone in ZONES.split("|")),
        "294276-12-31 23:59:59.999999+00", "294276-12-31 23:59:59.999999-01", "4714-11-24 00:00:00+00 BC",
        "4714-11-24 00:00:00+01 BC", "0001-12-31 23:59:59.5+00 BC", "2026-11-21 24:00", "9999-12-31 23:59:60",
     ]) for name in ("timestamp", "timestamptz")),
    ("int4[]", "int4[]", "v::int4[]::text", ARRAYS.split("|")),
    ("bytea", "bytea", "v::bytea::text", BYTES.split("|")),
]  # fmt: skip


def reader(name: str) -> Callable[[str], Any]:
    if name.endswith("[]"):
        return lambda text: read_array(text, READERS[name[:-2]])
    return read_bytea if name == "bytea" else READERS[name]


def same(name: str, ours: Any, theirs: str) -> bool:
    """Compare with `theirs`, the value as PostgreSQL prints it. Only Python reads its plain forms."""
    if name in ("bool", "uuid"):
        return theirs == (ours if name == "uuid" else str(ours).lower())
    if name == "numeric":
        return str(ours).lower() == theirs.lower() or Decimal(theirs) == ours
    if name in ("float4", "float8"):
        return (math.isnan(ours) and theirs == "NaN") or float(theirs) == pytest.approx(ours, rel=1e-7, abs=0)
    if name == "bytea":
        return theirs == "\\x" + ours.hex()
    if name == "int4[]":
        shown = str(ours).replace("[", "{").replace("]", "}").replace("None", "NULL").replace(" ", "")
        return theirs.rpartition("=")[2] == shown
    return (str(ours) if isinstance(ours, int) else f"{ours}inity") == theirs


@pytest.mark.postgres
@pytest.mark.parametrize(("name", "type_name", "shown", "texts"), TYPES, ids=[t[0] for t in TYPES])
def test_a_text_is_read_as_postgres_reads_it_or_refused_by_both(
    postgres_dsn: str, name: str, type_name: str, shown: str, texts: list[str]
) -> None:
    differ = []
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        for setting, value in DISPLAY_SETTINGS.items():
            connection.execute(f"SET {setting} = '{value}'")
        for text in texts:
            (valid,) = connection.execute("SELECT pg_input_is_valid(%s, %s)", (text, type_name)).fetchone() or (None,)
            try:
                ours = reader(name)(text)
            except InvalidTextError as error:
                if valid:
                    differ.append((text, str(error), "PostgreSQL reads it"))
                continue
            if not valid:
                differ.append((text, ours, "PostgreSQL refuses it"))
                continue
            (theirs,) = connection.execute(f"SELECT {shown} FROM (SELECT %s::text AS v)", (text,)).fetchone() or ("",)
            if not same(name, ours, theirs):
                differ.append((text, ours, theirs))
    assert differ == []


@pytest.mark.parametrize("text", ["{" * 50_000, "{" + " " * 90_000 + '"', '{"' + "\\" * 90_000, "{" + "," * 90_000])
def test_a_hostile_array_is_refused_without_recursion(text: str) -> None:
    with pytest.raises(InvalidTextError, match="malformed"):
        read_array(text, str)
    with pytest.raises(InvalidTextError, match="not supported"):
        read_array("{" + "1" * ARRAY_CHARS, str)


def test_array_elements_are_unescaped_and_null_is_only_null_when_it_is_bare() -> None:
    assert read_array('{"NULL",NULL,"x,\\"y\\\\",a\\,b,"",c d ,"[1]=x"}', str) == [
        "NULL", None, 'x,"y\\', "a,b", "", "c d", "[1]=x"
    ]  # fmt: skip


def test_an_empty_text_of_a_boolean_is_rejected_by_its_json_form() -> None:
    write = json_writer("bool")
    assert (write("t"), write("f")) == ("true", "false")
    with pytest.raises(InvalidTextError, match='invalid input syntax for type boolean: ""'):
        write("")
