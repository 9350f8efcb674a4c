"""Contents that a shard must have, computed from its log alone, and whether everything read from it agrees.

The model is the list of updates in the order in which they were appended: the list that a single writer would write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sim.world import Violated
from tidemill.consensus.state_log.replica import COMMAND
from tidemill.shards.handle import LogShard
from tidemill.shards.state.apply import RejectedCommand, apply
from tidemill.shards.state.codec import decode_command
from tidemill.shards.state.commands import Append
from tidemill.shards.state.state import ShardState, check_invariants

DEFAULT_N = 7
"""Value of the column `n` in a row that was written before the shard had that column."""

Row = tuple[str, str, int | None]
"""(k, v, n)."""
Update = tuple[str, str, int | None, int, int]
"""(k, v, n, time, diff)."""
Command = tuple[int, str, str | None, int]
"""(offset, k, v (None = deleted), time)."""


def n_of(offset: int, version: int) -> int:
    """Return the value of column `n` of a topic's record, read under this version of the schema."""
    return DEFAULT_N if version == 1 else DEFAULT_N + offset % 3


class Attempt(msgspec.Struct):
    """One compare-and-append as its writer knows it: either of `updates`, or of the updates that the commands in `seen`
    cause on the shard's contents.

    outcome: `running` (the writer died, or never learned the outcome), `ok`, or `refused`.
    """

    token: str
    lower: int
    upper: int
    updates: tuple[Update, ...] = ()
    seen: tuple[Command, ...] = ()
    outcome: str = "running"


class Frontiers:
    """Greatest since and upper returned by linearizable reads. A read that begins later may not return less."""

    def __init__(self) -> None:
        self.since = self.upper = 0

    async def read(self, shard: LogShard) -> tuple[int, int]:
        floor = self.since, self.upper
        since, upper = await shard.frontiers()
        if since < floor[0] or upper < floor[1]:
            raise Violated(f"since or upper went back: before={floor} now={(since, upper)}")
        self.since, self.upper = max(since, self.since), max(upper, self.upper)
        return since, upper


class Model:
    """Multiset of rows at every time."""

    def __init__(self, updates: Iterable[Update]) -> None:
        self.updates = sorted(updates, key=lambda update: update[3])

    def at(self, as_of: int) -> Counter[Row]:
        out: Counter[Row] = Counter()
        for *row, time, diff in self.updates:
            if time > as_of:
                break
            out[tuple(row)] += diff  # type: ignore[index]
        return Counter({row: count for row, count in out.items() if count})

    def from_since(self, since: int) -> Counter[Update]:
        """Return the history that is still distinguishable: everything up to `since` is one sum."""
        return _reported(self.updates, since)


def check_landed(records: Sequence[bytes], attempts: Mapping[str, Attempt]) -> list[Attempt]:
    """Return the attempts in the shard's log, in order, by a replay of every record that ever landed there.

    Raises Violated unless an acknowledged append is there once, a refused one never, and since and upper never go back.
    """
    state: ShardState | None = None
    stands: list[str] = []
    for data in records:
        if data[0] != COMMAND:
            continue
        command = decode_command(data[1:])
        result = apply(state, command)
        if isinstance(result, RejectedCommand):
            continue
        if state is not None and (result.since < state.since or result.upper < state.upper):
            raise Violated(f"since or upper went back: version={result.version}")
        state = result
        if isinstance(command, Append):
            stands.append(command.batch.token)
    if state is not None:
        check_invariants(state)
    for token, attempt in attempts.items():
        count = stands.count(token)
        if count > 1 or (attempt.outcome == "ok") > count or (attempt.outcome == "refused" and count):
            raise Violated(f"an append stands {count} times: attempt={attempt.outcome} token={token}")
    return [attempts[token] for token in stands]


def check_reads(reads: Iterable[tuple[int, Counter[Row]]], model: Model) -> None:
    """Check that the contents read at any time are those of the model, independent of when they were read."""
    for as_of, found in reads:
        wanted = model.at(as_of)
        if found != wanted:
            raise Violated(f"contents differ from the model: as_of={as_of} {difference(found, wanted)}")


def check_stored(stored: Iterable[Update], since: int, model: Model) -> None:
    """Check that the stored updates equal the model at every readable time, not only at times that were read."""
    found, wanted = _reported(stored, since), model.from_since(since)
    if found != wanted:
        raise Violated(f"history differs from the model: since={since} {difference(found, wanted)}")


def check_heard(heard: Counter[Update], frontier: int, model: Model) -> None:
    """Check that a listener from the beginning saw every update below its frontier once."""
    wanted = Counter(update for update in model.updates if update[3] < frontier)
    if heard != wanted:
        raise Violated(f"a listener missed or repeated updates: {difference(heard, wanted)}")


def folded(appends: Iterable[Attempt], evolved_at: int = 1 << 60) -> list[Update]:
    """Return the updates that one sequential upsert makes of the commands of `appends`: the highest offset wins within
    a key and time, null deletes, and an unchanged row gives no update. From `evolved_at` on, rows have column `n`."""
    live: dict[str, Row] = {}
    out: list[Update] = []
    for attempt in appends:
        winners: dict[tuple[int, str], tuple[int, str | None]] = {}
        for offset, key, value, time in attempt.seen:
            if attempt.lower <= time < attempt.upper and winners.get((time, key), (-1, None))[0] < offset:
                winners[time, key] = offset, value
        version = 1 if attempt.lower < evolved_at else 2
        for (time, key), (offset, value) in sorted(winners.items(), key=lambda item: item[0]):
            before, row = live.pop(key, None), None if value is None else (key, value, n_of(offset, version))
            if before is not None and before != row:
                out.append((*before, time, -1))
            if row is not None:
                live[key] = row
                if before != row:
                    out.append((*row, time, 1))
    return out


def check_nothing_skipped(appends: Iterable[Attempt], topic: Iterable[Command]) -> None:
    """Check that the writer of each time saw all records of that time in `topic`, which no compaction removed."""
    records = list(topic)
    for attempt in appends:
        missed = {r for r in records if attempt.lower <= r[3] < attempt.upper} - set(attempt.seen)
        if missed:
            raise Violated(f"an append left records out: lower={attempt.lower} {_short(sorted(missed))}")


def _reported(updates: Iterable[Update], since: int) -> Counter[Update]:
    out: Counter[Update] = Counter()
    for key, value, n, time, diff in updates:
        out[key, value, n, max(time, since), 0] += diff
    return Counter({update: count for update, count in out.items() if count})


def difference(found: Counter[Any], wanted: Counter[Any]) -> str:
    return f"missing={_short((wanted - found).elements())} extra={_short((found - wanted).elements())}"


def _short(rows: Iterable[Any]) -> str:
    return str([str(row)[:60] for row in list(rows)[:5]])
