"""One process of the tests across processes: `worker.py ROLE URL ARGUMENTS…`; speaks JSON lines."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from typing import Any, cast

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, FencedError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import Consensus, LogHead, Versioned, resolve_append, resolve_cas
from tidemill.consensus.factory import open_consensus

rand = Rand()
PAUSE_S = 0.05
"""Pause after a version that this process won. Without it one process wins all of its versions before the operating
system runs the others, and none of them loses."""


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def race(consensus: Consensus, name: str, count: str) -> None:
    """Race as equals for positions of one log and versions of one register; report what was won and seen."""
    positions: list[tuple[int, str]] = []
    versions: list[tuple[int, str]] = []
    seen: list[tuple[int, str, str]] = []
    at = seq = 0
    while len(positions) < int(count):
        nonce = rand.nonce()
        try:
            head = await consensus.append("race", 0, at, [nonce.encode()], nonce)
            positions.append((at, nonce))
            at = head.next
        except ConflictError as lost:
            at = cast(LogHead, lost.current).next
        except UnknownOutcomeError:
            if await resolve_append(consensus, "race", at, nonce):
                positions.append((at, nonce))
            at = (await consensus.log_head("race")).next
    # Wait until all four have won their positions: then all reach the register together.
    while not await consensus.wait("race", 4 * int(count) - 1, 30):
        pass
    while len(versions) < int(count):
        nonce = rand.nonce()
        try:
            seq = (await consensus.cas("race", seq, nonce.encode(), nonce)).seq
            versions.append((seq, nonce))
            await asyncio.sleep(PAUSE_S)
        except ConflictError as lost:
            current = cast(Versioned, lost.current)
            seen.append((current.seq, current.nonce, current.data.decode()))
            seq = current.seq
        except UnknownOutcomeError:
            written = await resolve_cas(consensus, "race", seq, nonce)
            if written is not None:
                versions.append((written.seq, nonce))
            head_now = await consensus.head("race")
            seq = head_now.seq if head_now else 0
    say(name=name, positions=positions, versions=versions, seen=seen)


async def lead(consensus: Consensus, name: str, seconds: str) -> None:
    """Take over again and again, write in one's term until fenced; report fences and acknowledged appends."""
    fences: list[tuple[int, int]] = []
    acknowledged: list[tuple[int, int, str]] = []
    stop_s = time.monotonic() + float(seconds)
    while time.monotonic() < stop_s:
        head = await consensus.log_head("led")
        term = head.term + 1
        try:
            head = await consensus.fence("led", term)
            fences.append((term, head.next))
            at = head.next
            for _ in range(rand.below(20)):
                nonce = rand.nonce()
                head = await consensus.append("led", term, at, [name.encode()], nonce)
                acknowledged.append((at, term, nonce))
                at = head.next
        except (FencedError, ConflictError):
            continue
    say(name=name, fences=fences, acknowledged=acknowledged)


async def pump(consensus: Consensus, name: str) -> None:
    """Append to this process's log without end; report every acknowledged position before the next attempt."""
    say(ready=True)
    at = 0
    while True:
        nonce = rand.nonce()
        try:
            head = await consensus.append(name, 0, at, [b"%d" % at], nonce)
        except UnknownOutcomeError:
            if not await resolve_append(consensus, name, at, nonce):
                continue
            head = await consensus.log_head(name)
        except UnavailableError:
            continue
        say(position=at, at_s=time.monotonic())
        at = head.next


async def hold(consensus: Consensus, name: str) -> None:
    """Host the sequencer, fork a child that does nothing, wait to be killed."""
    await consensus.append(name, 0, 0, [b"x"], "n")
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    say(ready=True, child=child.pid)
    await asyncio.sleep(60)


async def busy(consensus: Consensus, name: str, seconds: str) -> None:
    """Count this process's operations over a time, 8 concurrently; report the count and the slowest."""
    stop_s = time.monotonic() + float(seconds)
    counts = [0] * 8
    slowest_s = 0.0

    async def one(number: int) -> None:
        nonlocal slowest_s
        at = 0
        while time.monotonic() < stop_s:
            began_s = time.monotonic()
            at = (await consensus.append(f"{name}-{number}", 0, at, [b"x" * 100], "n")).next
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            counts[number] += 1

    await asyncio.gather(*[one(number) for number in range(8)])
    say(name=name, count=sum(counts), slowest_s=slowest_s)


async def visit(consensus: Consensus) -> None:
    """Host the sequencer until asked to leave, then leave in order."""
    say(ready=True)
    await asyncio.to_thread(sys.stdin.readline)


ROLES = {"visit": visit, "race": race, "lead": lead, "pump": pump, "hold": hold, "busy": busy}


async def main(role: str, url: str, *arguments: str) -> None:
    consensus = await open_consensus(url, SystemClock(), rand)
    await ROLES[role](consensus, *arguments)
    await consensus.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
