"""The contract suite of `consensus` for every backend, through its public methods only.

A backend's test module subclasses `ConsensusContract` and provides the fixture `open_client`: each call of it opens one
more client of the same engine. Names are unique per test, so engines may be shared.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from tidemill.base.clock import Rand
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    InvalidError,
    MissingError,
    UnknownOutcomeError,
)
from tidemill.base.limits import LOG_RECORD_BYTES, REGISTER_BYTES
from tidemill.consensus.api import Consensus, Lease, LogHead, Versioned, read_all_changes, resolve_append, resolve_cas
from tidemill.consensus.change_journal import PAGE_HEADS
from tidemill.consensus.operations import LEASE_TTL_MAX_MS

OpenClient = Callable[[], Awaitable[Consensus]]

rand = Rand()


def unique() -> str:
    return rand.nonce()[:12]


@contextlib.asynccontextmanager
async def clients(open_client: OpenClient, count: int) -> AsyncIterator[list[Consensus]]:
    opened: list[Consensus] = []
    try:
        for _ in range(count):
            opened.append(await open_client())
        yield opened
    finally:
        for client in opened:
            await client.aclose()


class ConsensusContract:
    # registers -----------------------------------------------------------------------------------

    async def test_a_register_counts_its_versions_and_keeps_data_and_nonce(self, open_client: OpenClient) -> None:
        async with clients(open_client, 2) as (one, two):
            key = unique()
            assert await one.head(key) is None
            assert await one.cas(key, 0, b"a", "n1") == Versioned(1, b"a", "n1")
            assert await two.head(key) == Versioned(1, b"a", "n1")
            assert await two.cas(key, 1, b"", "n2") == Versioned(2, b"", "n2")
            assert await one.head(key) == Versioned(2, b"", "n2")

    async def test_a_stale_or_early_write_conflicts_with_the_current_version_and_changes_nothing(
        self, open_client: OpenClient
    ) -> None:
        async with clients(open_client, 2) as (one, two):
            key = unique()
            with pytest.raises(ConflictError) as absent:
                await one.cas(key, 3, b"x", "n0")
            assert absent.value.current is None
            await one.cas(key, 0, b"a", "n1")
            for expected in (0, 2, 7):
                with pytest.raises(ConflictError) as caught:
                    await two.cas(key, expected, b"b", "n2")
                assert caught.value.current == Versioned(1, b"a", "n1")
            assert await one.head(key) == Versioned(1, b"a", "n1")

    async def test_of_racing_writers_exactly_one_wins_each_version(self, open_client: OpenClient) -> None:
        async with clients(open_client, 4) as opened:
            key = unique()
            won: list[tuple[int, str]] = []
            losers: list[tuple[str, str]] = []

            async def race(client: Consensus, name: str) -> None:
                seq = 0
                while seq < 20:
                    nonce = f"{name}-{seq}"
                    try:
                        version = await client.cas(key, seq, nonce.encode(), nonce)
                        won.append((version.seq, nonce))
                    except ConflictError as lost:
                        version = cast(Versioned, lost.current)
                        losers.append((version.nonce, nonce))
                    seq = version.seq

            await asyncio.gather(*[race(client, f"w{i}") for i, client in enumerate(opened)])
            assert sorted(seq for seq, _ in won) == list(range(1, len(won) + 1))
            assert all(winner != loser for winner, loser in losers)
            last = await opened[0].head(key)
            assert last is not None and (last.seq, last.nonce) == max(won)

    async def test_scan_yields_exactly_the_keys_with_the_prefix_in_key_order(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            root = "a" + unique()  # has an upper case
            inside = [f"{root}/a", f"{root}/a%", f"{root}/a_b", f"{root}/ab", f"{root}/é", f"{root}/\U0001f30a"]
            outside = [f"{root}", f"{root}0", f"{root}.a", "zz" + root, f"{root.upper()}/A"]
            for key in [*reversed(inside), *outside]:
                await one.cas(key, 0, key.encode(), "n")
            found = await one.scan(f"{root}/")
            assert [key for key, _ in found] == sorted(inside)
            assert all(version == Versioned(1, key.encode(), "n") for key, version in found)
            assert [key for key, _ in await one.scan(f"{root}/a")] == sorted(inside)[:4]
            assert [key for key, _ in await one.scan(f"{root}/a%")] == [f"{root}/a%"]
            assert [key for key, _ in await one.scan(f"{root}/a_")] == [f"{root}/a_b"]
            assert await one.scan(f"{root}/none") == []

    async def test_a_register_is_dropped_at_its_version_only_and_counts_anew(self, open_client: OpenClient) -> None:
        async with clients(open_client, 2) as (one, two):
            key, other = unique(), unique()
            with pytest.raises(ConflictError) as absent:
                await one.drop(key, 1)
            assert absent.value.current is None
            await one.cas(key, 0, b"a", "n1")
            await one.cas(key, 1, b"b", "n2")
            await one.cas(other, 0, b"stays", "n")
            for expected in (1, 3):
                with pytest.raises(ConflictError) as caught:
                    await two.drop(key, expected)
                assert caught.value.current == Versioned(2, b"b", "n2")
            with pytest.raises(InvalidError):
                await two.drop(key, 0)
            await two.drop(key, 2)
            assert await one.head(key) is None and await two.head(key) is None
            assert await one.scan(key) == []
            with pytest.raises(ConflictError) as gone:
                await one.cas(key, 2, b"c", "n3")
            assert gone.value.current is None
            assert await one.cas(key, 0, b"c", "n3") == Versioned(1, b"c", "n3")
            assert await two.head(other) == Versioned(1, b"stays", "n")

    async def test_of_racing_drops_and_writes_each_version_has_one_fate(self, open_client: OpenClient) -> None:
        async with clients(open_client, 4) as opened:
            for _ in range(10):
                key = unique()
                await opened[0].cas(key, 0, b"a", "n1")
                ended = await asyncio.gather(
                    opened[0].drop(key, 1),
                    opened[1].cas(key, 1, b"b", "n2"),
                    opened[2].drop(key, 1),
                    opened[3].cas(key, 1, b"c", "n3"),
                    return_exceptions=True,
                )
                won = [outcome for outcome in ended if not isinstance(outcome, ConflictError)]
                assert len(won) == 1
                assert await opened[0].head(key) == won[0]

    async def test_registers_hold_up_to_their_limit_and_refuse_more(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            key = unique()
            largest = bytes(range(256)) * (REGISTER_BYTES // 256)
            await one.cas(key, 0, largest, "n")
            version = await one.head(key)
            assert version is not None and version.data == largest
            with pytest.raises(InvalidError):
                await one.cas(key, 1, largest + b"x", "n")
            assert (await one.head(key)) == version

    @pytest.mark.parametrize("name", ["", "nul\0", "x" * 600, "\ud800"])
    async def test_names_that_no_engine_stores_are_refused(self, open_client: OpenClient, name: str) -> None:
        async with clients(open_client, 1) as (one,):
            for attempt in (
                one.cas(name, 0, b"", "n"),
                one.cas(unique(), 0, b"", name),
                one.append(name, 0, 0, [b"x"], "n"),
                one.fence(name, 1),
                one.acquire(name, "h", 1000),
                one.acquire(unique(), name, 1000),
            ):
                with pytest.raises(InvalidError):
                    await attempt

    # logs ----------------------------------------------------------------------------------------

    async def test_an_unwritten_log_is_empty(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            log = unique()
            assert await one.log_head(log) == LogHead(0, 0, 0)
            found = await one.read(log, 0)
            assert found.records == () and found.head == LogHead(0, 0, 0)

    async def test_records_stand_at_consecutive_positions_with_their_term_and_nonce(
        self, open_client: OpenClient
    ) -> None:
        async with clients(open_client, 2) as (one, two):
            log = unique()
            assert await one.append(log, 0, 0, [b"a", b""], "n1") == LogHead(0, 0, 2)
            assert await two.append(log, 3, 2, [b"c"], "n2") == LogHead(3, 0, 3)
            found = await one.read(log, 0)
            assert [(r.position, r.term, r.nonce, r.data) for r in found.records] == [
                (0, 0, "n1", b"a"),
                (1, 0, "n1", b""),
                (2, 3, "n2", b"c"),
            ]
            assert found.head == await two.log_head(log) == LogHead(3, 0, 3)

    async def test_an_append_elsewhere_than_the_end_conflicts_and_writes_nothing(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            log = unique()
            await one.append(log, 0, 0, [b"a"], "n1")
            for expected in (0, 2, 9):
                with pytest.raises(ConflictError) as caught:
                    await one.append(log, 5, expected, [b"b", b"c"], "n2")
                assert caught.value.current == LogHead(0, 0, 1)
            assert await one.log_head(log) == LogHead(0, 0, 1)
            assert len((await one.read(log, 0)).records) == 1

    async def test_a_fenced_term_never_lands(self, open_client: OpenClient) -> None:
        async with clients(open_client, 2) as (old, new):
            log = unique()
            await old.append(log, 1, 0, [b"a"], "n1")
            assert await new.fence(log, 2) == LogHead(2, 0, 1)
            with pytest.raises(FencedError) as caught:
                await old.append(log, 1, 1, [b"b"], "n2")
            assert caught.value.current == LogHead(2, 0, 1)
            with pytest.raises(FencedError):
                await old.append(log, 1, 0, [b"b"], "n2")
            with pytest.raises(FencedError) as caught:
                await old.fence(log, 1)
            assert caught.value.current == LogHead(2, 0, 1)
            assert await new.fence(log, 2) == LogHead(2, 0, 1)
            assert await new.append(log, 2, 1, [b"c"], "n3") == LogHead(2, 0, 2)
            assert [r.data for r in (await old.read(log, 0)).records] == [b"a", b"c"]

    async def test_a_log_can_be_fenced_before_its_first_record(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            log = unique()
            assert await one.fence(log, 4) == LogHead(4, 0, 0)
            with pytest.raises(FencedError):
                await one.append(log, 3, 0, [b"a"], "n")
            assert await one.append(log, 5, 0, [b"a"], "n") == LogHead(5, 0, 1)
            with pytest.raises(FencedError):
                await one.fence(log, 4)

    async def test_of_racing_appenders_exactly_one_wins_each_position(self, open_client: OpenClient) -> None:
        async with clients(open_client, 4) as opened:
            log = unique()
            won: list[tuple[int, str]] = []

            async def race(client: Consensus, name: str) -> None:
                at = 0
                for number in range(15):
                    nonce = f"{name}-{number}"
                    while True:
                        try:
                            head = await client.append(log, 0, at, [nonce.encode()], nonce)
                        except ConflictError as lost:
                            at = cast(LogHead, lost.current).next
                        else:
                            won.append((at, nonce))
                            at = head.next
                            break

            await asyncio.gather(*[race(client, f"w{i}") for i, client in enumerate(opened)])
            found = await opened[0].read(log, 0)
            assert [(r.position, r.nonce) for r in found.records] == sorted(won)
            assert len(found.records) == 60

    async def test_appends_under_way_at_once_take_effect_in_call_order(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            log = unique()
            heads = await asyncio.gather(*[one.append(log, 1, 2 * i, [b"%d" % i, b"+"], f"n{i}") for i in range(50)])
            assert [head.next for head in heads] == [2 * i + 2 for i in range(50)]
            found = await one.read(log, 0)
            assert [r.data for r in found.records][::2] == [b"%d" % i for i in range(50)]
            assert [r.nonce for r in found.records][::2] == [f"n{i}" for i in range(50)]

    async def test_after_a_conflict_in_a_chain_each_later_append_is_judged_by_itself(
        self, open_client: OpenClient
    ) -> None:
        async with clients(open_client, 1) as (one,):
            log = unique()
            await one.append(log, 0, 0, [b"other"], "n")
            outcomes = await asyncio.gather(
                one.append(log, 0, 0, [b"late"], "n0"),
                one.append(log, 0, 1, [b"right"], "n1"),
                one.append(log, 0, 2, [b"next"], "n2"),
                return_exceptions=True,
            )
            assert isinstance(outcomes[0], ConflictError)
            assert outcomes[1:] == [LogHead(0, 0, 2), LogHead(0, 0, 3)]
            assert [r.data for r in (await one.read(log, 0)).records] == [b"other", b"right", b"next"]

    async def test_refused_operations_do_not_touch_the_ones_they_share_a_commit_with(
        self, open_client: OpenClient
    ) -> None:
        async with clients(open_client, 1) as (one,):
            root = unique()
            await one.fence(f"{root}-fenced", 9)
            attempts: list[Awaitable[Any]] = []
            for i in range(30):
                attempts.append(one.append(f"{root}-{i}", 0, 0, [b"x"], f"a{i}"))
                attempts.append(one.append(f"{root}-fenced", 1, 0, [b"x"], f"b{i}"))
                attempts.append(one.cas(f"{root}-{i}", 0, b"x", f"c{i}"))
                attempts.append(one.cas(f"{root}-{i}", 5, b"y", f"d{i}"))
                attempts.append(one.truncate(f"{root}-fenced", 1))
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
            kinds = [type(outcome) for outcome in outcomes]
            assert kinds == [LogHead, FencedError, Versioned, ConflictError, InvalidError] * 30

    async def test_reads_are_cut_by_records_and_bytes_but_never_empty(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            log = unique()
            await one.append(log, 0, 0, [b"%03d" % i * 100 for i in range(50)], "n")
            assert [r.position for r in (await one.read(log, 7, limit_records=3)).records] == [7, 8, 9]
            assert [r.position for r in (await one.read(log, 7, limit_bytes=700)).records] == [7, 8]
            assert [r.position for r in (await one.read(log, 7, limit_bytes=1)).records] == [7]
            assert [r.position for r in (await one.read(log, 48)).records] == [48, 49]
            for beyond in (50, 99):
                found = await one.read(log, beyond)
                assert found.records == () and found.head.next == 50

    async def test_truncation_forgets_the_past_and_numbering_goes_on(self, open_client: OpenClient) -> None:
        async with clients(open_client, 2) as (one, two):
            log = unique()
            await one.append(log, 2, 0, [b"%d" % i for i in range(10)], "n")
            assert await one.truncate(log, 4) == LogHead(2, 4, 10)
            assert await two.truncate(log, 2) == LogHead(2, 4, 10)
            assert await two.log_head(log) == LogHead(2, 4, 10)
            with pytest.raises(MissingError):
                await two.read(log, 3)
            assert [r.position for r in (await two.read(log, 4)).records] == list(range(4, 10))
            with pytest.raises(InvalidError):
                await one.truncate(log, 11)
            assert await one.truncate(log, 10) == LogHead(2, 10, 10)
            assert (await two.read(log, 10)).records == ()
            with pytest.raises(ConflictError):
                await one.append(log, 2, 0, [b"again"], "n")
            assert await one.append(log, 2, 10, [b"on"], "n") == LogHead(2, 10, 11)

    async def test_an_append_carries_something_and_no_more_than_its_limits(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            log = unique()
            largest = b"\x01" * LOG_RECORD_BYTES
            await one.append(log, 0, 0, [largest, b"small"], "n")
            assert [len(r.data) for r in (await one.read(log, 0)).records] == [LOG_RECORD_BYTES]
            for records in ([], [largest + b"x"], [largest] * 9):
                with pytest.raises(InvalidError):
                    await one.append(log, 0, 2, records, "n")
            for wrong in (one.append(log, -1, 2, [b"x"], "n"), one.append(log, 0, -1, [b"x"], "n")):
                with pytest.raises(InvalidError):
                    await wrong
            assert await one.log_head(log) == LogHead(0, 0, 2)

    # wake-ups ------------------------------------------------------------------------------------

    async def test_a_wait_ends_when_another_client_appends(self, open_client: OpenClient) -> None:
        async with clients(open_client, 2) as (one, two):
            log = unique()
            loop = asyncio.get_running_loop()
            waits = [asyncio.ensure_future(one.wait(log, beyond, 30)) for beyond in (0, 0, 1, 2)]
            await asyncio.sleep(0.05)
            assert not any(wait.done() for wait in waits)
            began_s = loop.time()
            await two.append(log, 0, 0, [b"a", b"b"], "n1")
            assert await asyncio.gather(*waits[:3]) == [True] * 3
            assert loop.time() - began_s < 5
            assert not waits[3].done()
            await two.append(log, 0, 2, [b"c"], "n2")
            assert await waits[3]
            assert await one.wait(log, 2, 0)

    async def test_a_wait_ends_false_at_its_timeout_and_can_be_cancelled(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            log = unique()
            assert not await one.wait(log, 0, 0.02)
            assert not await one.wait(log, 0, 0)
            waiting = asyncio.ensure_future(one.wait(log, 0, 30))
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await one.append(log, 0, 0, [b"a"], "n")
            assert await one.wait(log, 0, 30)

    async def test_what_changed_is_told_from_a_token_on_and_at_first_everything(self, open_client: OpenClient) -> None:
        async with clients(open_client, 2) as (one, two):
            prefix = unique()
            assert await read_all_changes(one, prefix) == ({}, (await read_all_changes(one, prefix))[1])
            for name in "abc":
                await one.append(f"{prefix}/{name}", 1, 0, [b"x"], rand.nonce())
            await two.append(unique(), 1, 0, [b"elsewhere"], rand.nonce())
            found, token = await read_all_changes(one, prefix)
            assert found == {f"{prefix}/{name}": LogHead(1, 0, 1) for name in "abc"}
            await two.append(f"{prefix}/b", 1, 1, [b"y", b"z"], rand.nonce())
            await two.fence(f"{prefix}/c", 7)
            await two.fence(f"{prefix}/d", 2)
            await two.truncate(f"{prefix}/b", 2)
            found, token = await read_all_changes(one, prefix, token)
            assert (
                found.items()
                >= {
                    f"{prefix}/b": LogHead(1, 2, 3),
                    f"{prefix}/c": LogHead(7, 0, 1),
                    f"{prefix}/d": LogHead(2, 0, 0),
                }.items()
            )
            with pytest.raises(FencedError):
                await two.append(f"{prefix}/c", 1, 1, [b"late"], rand.nonce())
            assert await read_all_changes(one, f"{prefix}/zz") == (
                {},
                (await read_all_changes(one, f"{prefix}/zz"))[1],
            )
            found, _ = await read_all_changes(one, prefix, token)
            assert found.get(f"{prefix}/c", LogHead(7, 0, 1)) == LogHead(7, 0, 1)

    async def test_of_more_logs_than_one_answer_takes_each_is_told(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (client,):
            prefix = unique()
            names = [f"{prefix}/{number}" for number in range(2 * PAGE_HEADS + 5)]
            await asyncio.gather(*(client.append(name, 1, 0, [b"x"], rand.nonce()) for name in names))
            found, token = await read_all_changes(client, prefix)
            assert found == dict.fromkeys(names, LogHead(1, 0, 1))
            await asyncio.gather(*(client.append(name, 1, 1, [b"x"], rand.nonce()) for name in names))
            found, token = await read_all_changes(client, prefix, token)
            assert found == dict.fromkeys(names, LogHead(1, 0, 2))

    @pytest.mark.parametrize("token", ["nonsense", ":", "::", "a:1", "memory:7777", "memory:-1:x", "1.0.5:²", "é:1:x"])
    async def test_a_token_that_nobody_knows_is_answered_by_everything(
        self, open_client: OpenClient, token: str
    ) -> None:
        async with clients(open_client, 1) as (client,):
            prefix = unique()
            await client.append(f"{prefix}/a", 1, 0, [b"x"], rand.nonce())
            found, _ = await read_all_changes(client, prefix, token)
            assert found == {f"{prefix}/a": LogHead(1, 0, 1)}

    # leases --------------------------------------------------------------------------------------

    async def test_a_live_lease_is_its_holders_alone_and_renewing_keeps_the_term(self, open_client: OpenClient) -> None:
        async with clients(open_client, 2) as (one, two):
            name = unique()
            first = await one.acquire(name, "h1", 60_000, b"addr")
            assert (first.term, first.holder, first.info, first.live) == (1, "h1", b"addr", True)
            assert 0 < first.remaining_ms <= 60_000
            with pytest.raises(ConflictError) as caught:
                await two.acquire(name, "h2", 60_000)
            current = caught.value.current
            assert isinstance(current, Lease) and current.live
            assert (current.holder, current.term, current.info) == ("h1", 1, b"addr")
            renewed = await one.acquire(name, "h1", 50_000, b"moved")
            assert (renewed.term, renewed.info, renewed.ttl_ms) == (1, b"moved", 50_000)

    async def test_an_expired_lease_is_taken_in_a_new_term(self, open_client: OpenClient) -> None:
        async with clients(open_client, 2) as (one, two):
            conflicts, ttl_ms = 0, 30
            while not conflicts and ttl_ms < 10_000:  # on a slow machine, a short lease expires before it conflicts
                name, ttl_ms = unique(), 2 * ttl_ms
                await one.acquire(name, "h1", ttl_ms)
                while True:
                    try:
                        taken = await two.acquire(name, "h2", 60_000)
                        break
                    except ConflictError:
                        conflicts += 1
                        await asyncio.sleep(0.005)
            assert conflicts > 0
            assert (taken.holder, taken.term, taken.info) == ("h2", 2, b"")
            with pytest.raises(ConflictError):
                await one.acquire(name, "h1", 60_000)
            await one.release(name, "h1", 1)
            assert (await one.leases(name))[0].holder == "h2"

    async def test_a_released_lease_is_free_at_once_and_its_term_is_spent(self, open_client: OpenClient) -> None:
        async with clients(open_client, 2) as (one, two):
            name = unique()
            await one.acquire(name, "h1", 60_000)
            await two.release(name, "h2", 1)
            await two.release(name, "h1", 7)
            assert (await two.leases(name))[0].live
            await one.release(name, "h1", 1)
            await one.release(name, "h1", 1)
            (free,) = await two.leases(name)
            assert (free.live, free.term, free.remaining_ms) == (False, 1, 0)
            assert (await one.acquire(name, "h1", 60_000)).term == 2
            await one.release(name, "h1", 2)
            assert (await two.acquire(name, "h2", 60_000)).term == 3
            await two.release(unique(), "nobody", 1)

    async def test_of_racing_candidates_one_holds_each_term(self, open_client: OpenClient) -> None:
        async with clients(open_client, 3) as opened:
            name = unique()
            terms: list[int] = []

            async def race(client: Consensus, holder: str) -> None:
                held = 0
                while held < 5:
                    try:
                        lease = await client.acquire(name, holder, 60_000)
                    except ConflictError:
                        await asyncio.sleep(0.001)
                        continue
                    terms.append(lease.term)
                    held += 1
                    await client.release(name, holder, lease.term)

            await asyncio.gather(*[race(client, f"h{i}") for i, client in enumerate(opened)])
            assert sorted(terms) == list(range(1, 16))

    async def test_leases_lists_live_and_expired_by_prefix_in_name_order(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            root = unique()
            for suffix in ("/b", "/a", "0"):
                await one.acquire(root + suffix, "h", 60_000)
            await one.acquire(f"{root}/c", "h", 1)
            while (await one.leases(f"{root}/c"))[0].live:
                await asyncio.sleep(0.005)
            found = await one.leases(f"{root}/")
            assert [(lease.name, lease.live) for lease in found] == [
                (f"{root}/a", True),
                (f"{root}/b", True),
                (f"{root}/c", False),
            ]
            # No other holder intervened: the term is unchanged.
            assert (await one.acquire(f"{root}/c", "h", 60_000)).term == 1

    async def test_the_longest_time_to_live_is_the_one_that_the_error_names(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            name = unique()
            for ttl_ms in (LEASE_TTL_MAX_MS + 1, 0, -5):
                with pytest.raises(InvalidError, match=f"1 to {LEASE_TTL_MAX_MS} ms: .* ttl_ms={ttl_ms}\\."):
                    await one.acquire(name, "h", ttl_ms)
            assert await one.leases(name) == []
            lease = await one.acquire(name, "h", LEASE_TTL_MAX_MS)
            assert lease.live and lease.ttl_ms == LEASE_TTL_MAX_MS
            await one.release(name, "h", lease.term)

    # outcomes ------------------------------------------------------------------------------------

    async def test_resolving_by_nonce_tells_whose_write_it_was(self, open_client: OpenClient) -> None:
        async with clients(open_client, 1) as (one,):
            log, key = unique(), unique()
            assert not await resolve_append(one, log, 0, "mine")
            await one.append(log, 0, 0, [b"x"], "mine")
            await one.append(log, 0, 1, [b"y"], "theirs")
            assert await resolve_append(one, log, 0, "mine")
            assert not await resolve_append(one, log, 1, "mine")
            assert await resolve_cas(one, key, 0, "mine") is None
            await one.cas(key, 0, b"x", "mine")
            assert await resolve_cas(one, key, 0, "mine") == Versioned(1, b"x", "mine")
            assert await resolve_cas(one, key, 0, "theirs") is None
            await one.cas(key, 1, b"y", "theirs")
            with pytest.raises(UnknownOutcomeError):
                await resolve_cas(one, key, 0, "mine")

    async def test_a_closed_client_refuses_and_leaves_nobody_waiting(self, open_client: OpenClient) -> None:
        async with clients(open_client, 2) as (one, two):
            log = unique()
            waiting = asyncio.ensure_future(one.wait(log, 0, 50))
            await asyncio.sleep(0.05)
            await one.aclose()
            with pytest.raises(ClosedError):
                await waiting
            for attempt in (one.head(log), one.append(log, 0, 0, [b"x"], "n"), one.wait(log, 0, 1)):
                with pytest.raises(ClosedError):
                    await attempt
            await one.aclose()
            assert await two.append(log, 0, 0, [b"x"], "n") == LogHead(0, 0, 1)

    async def test_closing_during_writes_leaves_no_caller_hanging_and_claims_nothing(
        self, open_client: OpenClient
    ) -> None:
        async with clients(open_client, 2) as (one, two):
            log, root = unique(), unique()
            attempts = [asyncio.ensure_future(one.append(log, 0, i, [b"x"], f"n{i}")) for i in range(20)]
            attempts += [asyncio.ensure_future(one.fence(f"{root}{i}", 1)) for i in range(20)]
            await asyncio.sleep(0.001)
            await one.aclose()
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
            acknowledged = sum(isinstance(outcome, LogHead) for outcome in outcomes[:20])
            assert all(
                isinstance(outcome, (LogHead, UnknownOutcomeError, ClosedError, ConflictError)) for outcome in outcomes
            )
            assert acknowledged <= (await two.log_head(log)).next <= 20
