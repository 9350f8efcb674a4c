"""The contract across processes, on SQLite and PostgreSQL: races, fencing, SIGKILL of the sequencer's host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.consensus.urls import url as url
from support.waiting import run
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ClosedError, UnknownOutcomeError
from tidemill.consensus.api import Consensus, LogRecord, resolve_append
from tidemill.consensus.factory import open_consensus

WORKER = Path(__file__).parents[1] / "support" / "consensus" / "worker.py"
TAKEOVER_S = 20.0
"""About two seconds on an idle machine; the tests share theirs."""


def start(role: str, url: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), role, url, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def last_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    facts: dict[str, Any] = json.loads(out.splitlines()[-1])
    return facts


@contextlib.contextmanager
def killed_at_end(processes: list[subprocess.Popen[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


async def opened(url: str) -> Consensus:
    return await open_consensus(url, SystemClock(), Rand())


async def everything(consensus: Consensus, log: str) -> list[LogRecord]:
    records: list[LogRecord] = []
    while True:
        found = await consensus.read(log, len(records))
        if not found.records:
            return records
        records.extend(found.records)


async def test_four_processes_racing_have_one_winner_per_position_and_version(url: str) -> None:
    with killed_at_end([start("race", url, f"p{i}", "25") for i in range(4)]) as processes:
        reports = [last_line(process) for process in processes]
    positions = sorted(tuple(won) for report in reports for won in report["positions"])
    versions = sorted(tuple(won) for report in reports for won in report["versions"])
    assert [position for position, _ in positions] == list(range(100))
    assert [seq for seq, _ in versions] == list(range(1, 101))
    # Every version shown to a loser, at any moment, is the one that its single winner wrote, with the winner's nonce.
    seen = {tuple(version) for report in reports for version in report["seen"]}
    assert len(seen) > 20
    assert seen <= {(seq, nonce, nonce) for seq, nonce in versions}
    consensus = await opened(url)
    records = await everything(consensus, "race")
    assert [(r.position, r.nonce) for r in records] == positions
    assert [r.data.decode() for r in records] == [nonce for _, nonce in positions]
    last = await consensus.head("race")
    assert last is not None and (last.seq, last.nonce) == versions[-1]
    await consensus.aclose()


async def test_a_fenced_term_never_lands_whoever_races(url: str) -> None:
    with killed_at_end([start("lead", url, f"p{i}", "1.5") for i in range(4)]) as processes:
        reports = [last_line(process) for process in processes]
    fences = [tuple(fence) for report in reports for fence in report["fences"]]
    acknowledged = {at: (term, nonce) for report in reports for at, term, nonce in report["acknowledged"]}
    assert len(acknowledged) > 20 and len(fences) > 4
    consensus = await opened(url)
    records = await everything(consensus, "led")
    terms = [record.term for record in records]
    assert terms == sorted(terms)
    assert {r.position: (r.term, r.nonce) for r in records} == acknowledged
    for term, next_position in fences:
        assert all(record.term >= term for record in records[next_position:])
    await consensus.aclose()


def test_everybody_makes_progress_beside_busy_others(url: str) -> None:
    with killed_at_end([start("busy", url, f"p{i}", "2") for i in range(4)]) as processes:
        reports = [last_line(process) for process in processes]
    counts = [report["count"] for report in reports]
    assert min(counts) > max(counts) / 10, reports
    assert max(report["slowest_s"] for report in reports) < 3, reports


def test_acknowledged_writes_survive_sigkill_of_the_host_and_others_take_over(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/consensus.db"
    with killed_at_end([start("pump", url, "p0")]) as processes:
        assert processes[0].stdout is not None and json.loads(processes[0].stdout.readline())["ready"]
        processes.extend(start("pump", url, f"p{i}") for i in range(1, 4))
        for process in processes[1:]:
            assert process.stdout is not None and json.loads(process.stdout.readline())["ready"]
        acknowledged: dict[int, int] = {}

        def drain(number: int, after_s: float) -> None:
            """Read acknowledgements until one that was given after `after_s`."""
            pipe = processes[number].stdout
            assert pipe is not None
            while True:
                reported = json.loads(pipe.readline())
                acknowledged[number] = reported["position"]
                if reported["at_s"] > after_s:
                    return

        for victim in range(3):
            for number in range(victim, 4):
                drain(number, time.monotonic())
            processes[victim].kill()
            killed_s = time.monotonic()
            pipe = processes[victim].stdout
            assert pipe is not None
            for line in pipe.read().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    acknowledged[victim] = json.loads(line)["position"]
            for number in range(victim + 1, 4):
                drain(number, killed_s + 0.1)
            assert time.monotonic() - killed_s < TAKEOVER_S

    async def body() -> None:
        consensus = await opened(url)
        for number, position in acknowledged.items():
            records = await everything(consensus, f"p{number}")
            assert [r.data for r in records] == [b"%d" % i for i in range(len(records))]
            assert len(records) > position
        await consensus.aclose()

    run(body())


def test_a_client_goes_on_soon_after_the_host_was_killed(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/consensus.db"
    with killed_at_end([start("pump", url, "host")]) as (host,):
        assert host.stdout is not None and json.loads(host.stdout.readline())["ready"]

        async def body() -> None:
            consensus = await opened(url)
            await consensus.append("mine", 0, 0, [b"a"], "n1")
            waiting = asyncio.ensure_future(consensus.wait("mine", 1, 60))
            reading = asyncio.ensure_future(consensus.wait("other", 0, 60))
            await asyncio.sleep(0.05)
            host.kill()
            began_s = time.monotonic()
            with contextlib.suppress(UnknownOutcomeError):
                await consensus.append("mine", 0, 1, [b"b"], "n2")
            if not await resolve_append(consensus, "mine", 1, "n2"):
                await consensus.append("mine", 0, 1, [b"b"], "n2")
            assert time.monotonic() - began_s < TAKEOVER_S
            assert await waiting
            await consensus.append("other", 0, 0, [b"c"], "n3")
            assert await reading
            assert [r.data for r in await everything(consensus, "mine")] == [b"a", b"b"]
            await consensus.aclose()

        run(body())


def test_an_orderly_change_of_host_costs_nobody_an_unknown(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/consensus.db"
    with killed_at_end([start("visit", url)]) as (host,):
        assert host.stdout is not None and json.loads(host.stdout.readline())["ready"]

        async def body() -> None:
            consensus = await opened(url)
            leaving = False

            async def pump(name: str) -> int:
                at = 0
                while not leaving or host.poll() is None or at % 10:
                    at = (await consensus.append(name, 0, at, [b"x"], "n")).next
                return at

            pumps = [asyncio.ensure_future(pump(f"log-{i}")) for i in range(8)]
            await asyncio.sleep(0.1)
            assert host.stdin is not None
            host.stdin.write("leave\n")
            host.stdin.flush()
            leaving = True
            ends = await asyncio.gather(*pumps)
            assert host.returncode == 0
            for number, end in enumerate(ends):
                assert (await consensus.log_head(f"log-{number}")).next == end
            await consensus.aclose()

        run(body())


def test_a_forked_child_does_not_keep_the_lock_of_its_killed_parent(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/consensus.db"
    with killed_at_end([start("hold", url, "held")]) as (host,):
        assert host.stdout is not None
        child = json.loads(host.stdout.readline())["child"]
        try:
            host.kill()
            host.wait()
            os.kill(child, 0)

            async def body() -> None:
                consensus = await opened(url)
                assert [r.data for r in await everything(consensus, "held")] == [b"x"]
                await consensus.aclose()

            run(body(), within_s=TAKEOVER_S)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_forked_child_cannot_use_its_parents_client(tmp_path: Path) -> None:
    consensus = await opened(f"sqlite://{tmp_path}/consensus.db")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            await consensus.head("key")
        except ClosedError:
            status = 0
        finally:
            os._exit(status)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert status == 0
    await consensus.cas("key", 0, b"x", "n")
    await consensus.aclose()
