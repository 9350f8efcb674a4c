"""Types of columns that an oracle's world has: random values as PostgreSQL's own text."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from datetime import date, timedelta

ENUM = "oracle.mood"
MOODS = ("sad", "ok", "hap'py", "Ünsure", "new one")
"""Values of the enum; the last one is added while the world runs."""
TOAST_CHARS = (2_500, 9_000)
_ODD = "aZ09 éß漢😀'\"\\,{}/._%-\t\n\r;$()|\x01"


def text(rand: random.Random, longest: int = 12) -> str:
    return "".join(rand.choice(_ODD) for _ in range(rand.randint(0, longest)))


def _long_text(rand: random.Random) -> str:
    if rand.random() < 0.08:
        return "".join(chr(rand.randint(33, 126)) for _ in range(rand.randint(*TOAST_CHARS)))
    return text(rand, 30)


def _integer(bits: int) -> Callable[[random.Random], str]:
    top = 1 << (bits - 1)

    def make(rand: random.Random) -> str:
        if rand.random() < 0.1:
            return str(rand.choice([top - 1, -top, 0, -1]))
        return str(rand.randint(-20, 60))

    return make


def _float(rand: random.Random) -> str:
    if rand.random() < 0.15:
        return rand.choice(["NaN", "Infinity", "-Infinity", "0", "-0", "1e-30", "3.5e20"])
    return repr(rand.randint(-400, 400) / 8 + rand.choice([0, 0.1]))


def _decimal(places: int, special: tuple[str, ...]) -> Callable[[random.Random], str]:
    def make(rand: random.Random) -> str:
        if special and rand.random() < 0.1:
            return rand.choice(special)
        return f"{rand.randint(-50_000, 50_000)}.{rand.randint(0, 10**places - 1):0{places}d}"

    return make


def _day(rand: random.Random) -> str:
    if rand.random() < 0.08:
        return rand.choice(["infinity", "-infinity", "0044-03-15 BC", "9999-12-31"])
    return str(date(2020, 1, 1) + timedelta(days=rand.randint(0, 900)))


def _clock(rand: random.Random) -> str:
    micros = rand.choice(["", f".{rand.randint(1, 999_999):06d}"])
    return f"{rand.randint(0, 23):02d}:{rand.randint(0, 59):02d}:{rand.randint(0, 59):02d}{micros}"


def _moment(zone: str) -> Callable[[random.Random], str]:
    def make(rand: random.Random) -> str:
        if rand.random() < 0.08:
            return rand.choice(["infinity", "-infinity"])
        return f"{date(2021, 1, 1) + timedelta(days=rand.randint(0, 400))} {_clock(rand)}{zone}"

    return make


def _quoted(element: str | None) -> str:
    return "NULL" if element is None else '"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _array(element: Callable[[random.Random], str]) -> Callable[[random.Random], str]:
    def make(rand: random.Random) -> str:
        items = [None if rand.random() < 0.15 else element(rand) for _ in range(rand.randint(0, 4))]
        return "{" + ",".join(_quoted(item) for item in items) + "}"

    return make


VALUES: dict[str, Callable[[random.Random], str]] = {
    "smallint": _integer(16),
    "integer": _integer(32),
    "bigint": _integer(64),
    "numeric(12,3)": _decimal(3, ("NaN",)),
    "numeric(16,3)": _decimal(3, ("NaN",)),
    "numeric": _decimal(7, ("NaN", "0.000", "-99999999999999999999999999999.5")),
    "real": _float,
    "double precision": _float,
    "boolean": lambda rand: rand.choice(["true", "false"]),
    "text": _long_text,
    'text COLLATE "C"': _long_text,
    "character varying(20)": lambda rand: text(rand, 20),
    "character varying(40)": lambda rand: text(rand, 40),
    "character(6)": lambda rand: rand.choice(["", "a", "ab  ", "abcdef", "é"]),
    "bytea": lambda rand: "\\x" + rand.randbytes(rand.randint(0, 12)).hex(),
    "uuid": lambda rand: str(uuid.UUID(int=rand.choice([0, 7, rand.getrandbits(128)]))),
    "date": _day,
    "time without time zone": _clock,
    "timestamp without time zone": _moment(""),
    "timestamp with time zone": _moment("+02"),
    "interval": lambda rand: f"{rand.randint(-3, 3)} mon {rand.randint(0, 90)} min",
    "jsonb": lambda rand: rand.choice(['{"b": [1, null], "a": "x\\"y"}', "[]", "null", '"ä"', "1.50"]),
    "inet": lambda rand: f"10.0.{rand.randint(0, 255)}.1/{rand.choice([8, 32])}",
    ENUM: lambda rand: rand.choice(MOODS[:-1]),
    "integer[]": _array(_integer(32)),
    "text[]": _array(text),
}
KEY_TYPES = ("integer", "bigint", "smallint", "text", "uuid", "date", ENUM)
"""Types of the columns of a key."""

WIDER = {
    "smallint": "integer",
    "integer": "bigint",
    "real": "double precision",
    "numeric(12,3)": "numeric(16,3)",
    "character varying(20)": "character varying(40)",
    "character varying(40)": "text",
}
"""Changes of a type after which a table keeps streaming (docs/guides/capture.md)."""


def key_value(rand: random.Random, kind: str) -> str:
    """Return a value from a space so small that writers conflict."""
    if kind in ("integer", "bigint", "smallint"):
        return str(rand.randint(1, 90))
    if kind == "text":
        return rand.choice(["", "/", "a", "b.c", "_", '"q"', "ü", "x/y", "NULL"]) + str(rand.randint(0, 9))
    if kind == "uuid":
        return str(uuid.UUID(int=rand.randint(0, 60)))
    if kind == "date":
        return str(date(2024, 1, 1) + timedelta(days=rand.randint(0, 60)))
    return rand.choice(MOODS[:-1])
