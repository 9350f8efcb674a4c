"""A topic of users with a sequence, deletions and dead letters; and its table as a batch job computes it."""

from __future__ import annotations

import random
from typing import Any

from support.spark.sequence_world import Record, max_by
from tidemill.spark.predicates.expectations import Expectation, Expectations

STRICT = Expectations((Expectation("small", "n < 60"),))
DECLARED: dict[str, Any] = {
    "key": "id", "schema": "id string, version long, n long, gone boolean", "sequence_by": "version",
    "delete_when": "gone", "except_columns": "gone",
}  # fmt: skip


def value(key: str, version: int | None, n: int | None) -> tuple[str, dict[str, Any]]:
    return key, {"id": key, "version": version, "n": n, "gone": n is None}


def contents(harbour: Any) -> list[tuple[str, int, int]]:
    return [(r["id"], r["version"], r["n"]) for r in harbour.contents("users")]


def random_records(seed: int, count: int) -> list[tuple[str, int, int | None]]:
    rand = random.Random(seed)
    return [
        (f"k{rand.randint(0, 9)}", rand.randint(0, 20), rand.choice([None, number, number])) for number in range(count)
    ]


def expected_of(records: list[tuple[str, int, int | None]]) -> list[tuple[str, int, int]]:
    versions: list[Record] = [(int(k[1:]), (v,), None if n is None else at, 0) for at, (k, v, n) in enumerate(records)]
    places = sorted(max_by(versions, 0).values())
    return sorted((records[at][0], records[at][1], records[at][2] or 0) for at in places)
