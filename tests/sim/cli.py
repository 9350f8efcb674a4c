"""`./dev sim`: run many seeds, or replay one.

Exit 0 when every seed is clean, 1 at the first seed that fails (its replay command is printed), 2 on bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa
import structlog

from sim.pace import PACED_FROM, varied_pace
from sim.scenarios import FAULTS, ROOMS, scenario
from sim.world import Outcome, World, log_to_trace
from tidemill.base.errors import InvalidError

CHUNK = 20
"""Seeds that one process runs between two garbage collections."""

Failure = tuple[str, int, str]
"""(room, seed, error)."""


def run_seed(room: str, seed: int, fault: str = "") -> Outcome:
    """Run one world from its beginning to its end."""
    with varied_pace(seed):
        return World(seed).run(scenario(room, fault))


def prepare() -> None:
    """Send logs to the trace and keep the garbage collector out of the worlds, whose order it could disturb."""
    structlog.configure(processors=[log_to_trace], cache_logger_on_first_use=False)
    gc.disable()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./dev sim", description="Run the rooms in seeded worlds under faults.")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run, from --first on")
    parser.add_argument("--first", type=int, default=0, help=f"first seed; from {PACED_FROM} on with varied limits")
    parser.add_argument("--seed", type=int, default=None, help="run this one seed and print its trace's hash")
    parser.add_argument(
        "--room", metavar="ROOM", default="all", choices=(*ROOMS, "all"), help=f"{', '.join(ROOMS)}, all"
    )
    parser.add_argument(
        "--fault", metavar="FAULT", default="", choices=("", *FAULTS), help="plant a fault of sim/scenarios/__init__.py"
    )
    parser.add_argument("--trace", action="store_true", help="print every event of the seed")
    parser.add_argument("--seconds", type=float, default=None, help="stop cleanly after this much real time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; results do not depend on it")
    options = parser.parse_args(argv)
    try:
        rooms = _rooms(options.room, options.fault)
    except InvalidError as error:
        print(error, file=sys.stderr)
        return 2
    prepare()
    if options.seed is not None:
        return _replay(rooms, options.seed, options.fault, options.trace)
    seeds = range(options.first, options.first + options.seeds)
    return _many(rooms, seeds, options.fault, options.seconds, max(1, options.jobs))


def _rooms(room: str, fault: str) -> tuple[str, ...]:
    if not fault:
        return ROOMS if room == "all" else (room,)
    found_in = FAULTS[fault][0]
    if room not in ("all", found_in):
        raise InvalidError(f"the fault is not in this room: fault={fault} room={room}.", fix=f"Use --room {found_in}.")
    return (found_in,)


def _replay(rooms: Sequence[str], seed: int, fault: str, trace: bool) -> int:
    bad = 0
    for room in rooms:
        outcome = run_seed(room, seed, fault)
        if trace:
            print("\n".join(outcome.trace))
        print(
            f"{room} seed {seed}: {outcome.error or 'clean'}\n"
            f"{room} seed {seed}: steps={outcome.steps} virtual_s={outcome.virtual_s:.3f} trace={outcome.digest}"
        )
        bad += not outcome.ok
    return 1 if bad else 0


def _many(rooms: Sequence[str], seeds: range, fault: str, seconds: float | None, jobs: int) -> int:
    started = time.perf_counter()  # real time, for progress only; no world sees it
    steps = done = 0
    shown = 0.0
    with contextlib.ExitStack() as stack:
        for count, took, failed in _chunks(rooms, seeds, fault, jobs, stack):
            done += count
            steps += took
            elapsed = time.perf_counter() - started
            if failed is not None:
                room, seed, error = failed
                planted = f" --fault {fault}" if fault else ""
                print(f"\n{room} seed {seed} failed after {elapsed:.1f} s: {error}")
                print(f"replay: ./dev sim --room {room} --seed {seed}{planted} --trace")
                return 1
            if elapsed - shown >= 1.0 and sys.stderr.isatty():
                shown = elapsed
                line = f"\r{done}/{len(seeds)} seeds, {steps:,} steps, {elapsed:.0f} s"
                print(line, end="", file=sys.stderr, flush=True)
            if seconds is not None and elapsed >= seconds:
                break
    elapsed = time.perf_counter() - started
    print(f"{done} seeds clean in {', '.join(rooms)}: {steps:,} steps in {elapsed:.1f} s")
    return 0


def _chunks(
    rooms: Sequence[str], seeds: range, fault: str, jobs: int, stack: contextlib.ExitStack
) -> Iterator[tuple[int, int, Failure | None]]:
    """Return the results of the chunks in the order of their seeds, independent of the process that ran them."""
    chunks = [(rooms, list(seeds[at : at + CHUNK]), fault) for at in range(0, len(seeds), CHUNK)]
    if jobs == 1 or len(chunks) < 2 * jobs:
        return map(_run_chunk, chunks)
    pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs, initializer=prepare))
    return pool.imap(_run_chunk, chunks)


def _run_chunk(chunk: tuple[Sequence[str], list[int], str]) -> tuple[int, int, Failure | None]:
    """Run one chunk; return (seeds done, steps, first failure). Garbage is collected only between chunks."""
    rooms, seeds, fault = chunk
    steps = 0
    for done, seed in enumerate(seeds):
        for room in rooms:
            outcome = run_seed(room, seed, fault)
            steps += outcome.steps
            if not outcome.ok:
                return done, steps, (room, seed, outcome.error)
    gc.collect()
    return len(seeds), steps, None
