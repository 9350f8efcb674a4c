"""Comparison of a table with SELECT by key, and percentiles of latencies: the pure parts of `./dev bench versus`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from harbour import percentile

KEYS: Mapping[str, tuple[str, ...]] = {
    "warehouse": ("w_id",),
    "district": ("w_id", "d_id"),
    "customer": ("c_id",),
    "stock": ("w_id", "product_id"),
    "orders": ("o_id",),
    "order_line": ("o_id", "line"),
    "payment": ("p_id",),
    "probe": ("id",),
}


class Difference(NamedTuple):
    rows: int
    """Rows of SELECT."""
    missing: int
    extra: int
    """Rows whose key SELECT does not have, and repeated keys."""
    different: int

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.different)


def compare(selected: pa.Table, found: pa.Table, key: Sequence[str]) -> Difference:
    """Compare all columns of SELECT. Raises KeyError if the table lacks a column."""
    ours, theirs = _by_key(selected, selected.column_names, key), _by_key(found, selected.column_names, key)
    return Difference(
        selected.num_rows,
        len(ours.keys() - theirs.keys()),
        len(theirs.keys() - ours.keys()) + found.num_rows - len(theirs),
        sum(theirs[each] != row for each, row in ours.items() if each in theirs),
    )


def _by_key(table: pa.Table, columns: Sequence[str], key: Sequence[str]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    rows = zip(*(table.column(name).to_pylist() for name in columns), strict=True)
    places = [list(columns).index(name) for name in key]
    return {tuple(row[place] for place in places): row for row in rows}


def latencies(sent: Mapping[int, float], seen: Mapping[int, float], from_s: float, until_s: float) -> list[float]:
    """Return how many seconds after its commit each row was seen, of the rows committed in `from_s` ≤ t < `until_s`.

    Raises KeyError if one of them was not seen.
    """
    return [seen[each] - at_s for each, at_s in sent.items() if from_s <= at_s < until_s]


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Return nearest-rank percentiles in seconds; samples must not be empty."""
    found = {name: percentile(samples, part) for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {name: round(value, 3) for name, value in (found | {"max": max(samples)}).items()}
