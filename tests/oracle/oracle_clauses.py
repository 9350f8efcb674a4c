"""Random where clauses over a table's columns, within the grammar of docs/guides/shapes.md, that fail on no row."""

from __future__ import annotations

import random

from oracle_tables import Column, Table, identifier, literal
from oracle_types import ENUM, VALUES, key_value

_NUMBERS = ("smallint", "integer", "bigint", "numeric", "numeric(12,3)", "numeric(16,3)", "real", "double precision")
_TEXTS = ("text", 'text COLLATE "C"', "character varying(20)", "character varying(40)")
_MOMENTS = ("date", "timestamp without time zone", "timestamp with time zone", "time without time zone", "uuid")
_UNKNOWN_TO_CLAUSES = ("bytea", "interval", "jsonb", "inet")


def random_clause(rand: random.Random, table: Table) -> str:
    """Return a random clause; "" selects every row."""
    if rand.random() < 0.15:
        return ""
    return _logic(rand, table, rand.randint(0, 3))


def _logic(rand: random.Random, table: Table, depth: int) -> str:
    if depth > 0:
        left, right = _logic(rand, table, depth - 1), _logic(rand, table, depth - 1)
        return rand.choice(
            [
                f"({left}) AND ({right})",
                f"({left}) OR ({right})",
                f"({left}) OR ({right})",
                f"NOT ({left})",
                f"({left}) IS NOT TRUE",
                f"({left}) IS UNKNOWN OR ({right})",
            ]
        )
    return _test(rand, rand.choice([c for c in table.columns if c.kind not in _UNKNOWN_TO_CLAUSES]), table)


def _value(rand: random.Random, column: Column, table: Table) -> str:
    made = key_value(rand, column.kind) if column.name in table.key else VALUES[column.kind](rand)
    return literal(made[:40] if column.kind in _TEXTS else made)


def _test(rand: random.Random, column: Column, table: Table) -> str:
    name, kind = identifier(column.name), column.kind
    if rand.random() < 0.12:
        return f"{name} IS {rand.choice(['', 'NOT '])}NULL"
    a, b = _value(rand, column, table), _value(rand, column, table)
    compare = rand.choice(["=", "<>", "<", "<=", ">", ">="])
    among = [
        f"{name} IN ({a}, {b})",
        f"{name} NOT IN ({a}, {b})",
        f"{name} IS DISTINCT FROM {a}",
        f"{name} IS NOT DISTINCT FROM {a}",
    ]
    if kind == "boolean":
        return rand.choice([name, f"NOT {name}", f"{name} IS TRUE", f"{name} IS NOT FALSE", f"{name} = {a}"])
    if kind == ENUM:
        return rand.choice([f"{name} = {a}", f"{name} <> {a}", *among[:2], f"{name}::text LIKE '%a%'"])
    if kind.endswith("[]"):
        element = literal(VALUES[kind[:-2]](rand)[:20])
        return rand.choice([f"{name} = {a}", f"{name} <> {a}", f"{element} = ANY({name})", f"{element} <> ALL({name})"])
    if kind in _NUMBERS:
        shifted = f"{name}::numeric" if kind not in ("real", "double precision") else name
        return rand.choice(
            [
                f"{name} {compare} {a}",
                f"{name} BETWEEN SYMMETRIC {a} AND {b}",
                f"{name} NOT BETWEEN {a} AND {b}",
                f"{shifted} + 1 {compare} {rand.randint(-10, 50)}",
                f"{shifted} * 2 {compare} {rand.randint(-10, 90)}",
                f"COALESCE({name}, {a}) {compare} {b}",
                f"{name} {compare} ANY('{{{rand.randint(0, 9)}, {rand.randint(9, 40)}}}')",
                *among,
            ]
        )
    if kind in _TEXTS:
        return rand.choice(
            [
                f'{name} COLLATE "C" {compare} {a}',
                f"{name} LIKE '%a%'",
                f"{name} NOT ILIKE '_É%'",
                f"lower({name}) = lower({a})",
                f"length({name}) {compare} {rand.randint(0, 20)}",
                f"{name} || 'x' <> {a}",
                f"concat({name}, '-', {name}) <> '-'",
                *among,
            ]
        )
    if kind == "character(6)":
        return rand.choice([f"{name} = {a}", f"{name} <> {a}", *among])
    assert kind in _MOMENTS, kind
    return rand.choice([f"{name} {compare} {a}", f"{name} BETWEEN {a} AND {b}", *among])
