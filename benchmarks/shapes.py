"""`./dev bench shapes`: what one row of a captured table costs a node with many shapes over that table.

    taken       on capture's turn of the loop, per transaction of one row: what capture and tables wait for
    evaluated   in shapes' own share of the loop, until every shape's log has it

Synchronous, one process, no network. Afterwards every shape's log is compared with what its filter says of the rows.

    --live N    N shapes on one node, restored from their file, with their logs on disk   shapes_live.py
    --polls N   N long polls at one node, over HTTP                                        shapes_polls.py
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from pathlib import Path

import structlog

from harbour import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.shapes.consumer import TABLE, row
from support.shapes.crowd import Crowd
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.gc_tuning import install_gc_tuning
from tidemill.capture.changes import Change, Fragment
from tidemill.shapes.log.log_offset import BASE_END
from tidemill.shapes.tables.backlog import BacklogLimits

CROWDS = {
    "10 of id = K": [f"id = {n}" for n in range(10)],
    "1,000 of id = K": [f"id = {n}" for n in range(1_000)],
    "10,000 of id = K": [f"id = {n}" for n in range(10_000)],
    "1,000 of id IN (5 values)": [f"id IN ({', '.join(str(n + m) for m in range(5))})" for n in range(1_000)],
    "1,000 that match nothing and are scanned": [f"id < -{n}" for n in range(1_000)],
}


def fragment(number: int) -> Fragment:
    lsn = 100_000 + 8 * number
    change = Change(TABLE, "insert", ChangePosition(lsn, 0), row(number % 1_000), None)
    return Fragment(5 + number, lsn, 0, True, True, (change,), change.position, (), 100)


def measure(filters: list[str], rows: int) -> tuple[float, float]:
    """(taken, evaluated) in microseconds a row."""
    crowd = Crowd(filters, BacklogLimits(size_bytes=1 << 40, age_s=1e9))
    fragments = [fragment(number) for number in range(rows)]
    began_s = time.perf_counter()
    crowd.take(fragments)
    taken_s = time.perf_counter()
    crowd.finish()
    done_s = time.perf_counter()
    keys = Counter(number % 1_000 for number in range(rows))
    for shape in crowd.shapes:
        expected = matching(shape.definition.where, keys)
        found = 0
        offset = BASE_END
        while not (chunk := shape.log.read(offset)).complete or chunk.items:
            found, offset = found + len(chunk.items), chunk.end
        if found != expected:
            raise SystemExit(f"DOES NOT HOLD: where={shape.definition.where} items={found} expected={expected}")
    return (taken_s - began_s) / rows * 1e6, (done_s - taken_s) / rows * 1e6


def matching(where: str, keys: Counter[int]) -> int:
    if where.startswith("id = "):
        return keys[int(where[5:])]
    return sum(count for key, count in keys.items() if eval_filter(where, key))


def eval_filter(where: str, key: int) -> bool:
    left, _, right = where.partition(" ")
    assert left == "id"
    if right.startswith("IN"):
        return key in [int(each) for each in right[4:-1].split(",")]
    return key < int(right[2:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="shapes", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--live", type=int, default=0, metavar="N")
    parser.add_argument("--polls", type=int, default=0, metavar="N")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print(machine())
    install_gc_tuning()  # as `tidemill serve` does
    if options.live or options.polls:
        import shapes_live
        import shapes_polls

        count = options.live or options.polls
        one = shapes_live.measure(count, options.rows) if options.live else shapes_polls.measure(count)
        for name, value in asyncio.run(one).items():
            print(f"  {name:20} {value:12,.2f}")
        print(f"HOLDS: {'every log has its rows' if options.live else 'every client has every change'}")
        return 0
    for name, filters in CROWDS.items():
        rows = options.rows // 10 if "scanned" in name else options.rows
        taken_us, evaluated_us = measure(filters, rows)
        print(f"{name:45} taken {taken_us:6.2f} µs   evaluated {evaluated_us:8.1f} µs   rows {rows}", flush=True)
    print("HOLDS: every log has the rows of its filter")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
