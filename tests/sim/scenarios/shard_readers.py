"""Readers of the shard: short snapshots, long reads under holds that are renewed or expire, and one listener."""

from __future__ import annotations

import asyncio

from sim.scenarios.shard_nodes import Node, Shared, rows_of, updates_of
from sim.world import Violated
from tidemill.base.errors import InvalidError, MissingError, UnavailableError, UnknownOutcomeError
from tidemill.shards.api import HistoryLostError, SchemaEvolvedError
from tidemill.shards.parts.consolidate import sum_contents

HOLD_MS = 10**9


async def read(shared: Shared, node: Node) -> None:
    """Read snapshots at random readable times."""
    source = shared.world.source
    while True:
        await asyncio.sleep(source.uniform(0, 0.6))
        try:
            since, upper = await shared.frontiers.read(node.shard)
            if upper > since:
                as_of = source.randrange(since, upper)
                shared.reads.append((as_of, rows_of(await node.shard.snapshot(as_of, timeout_s=1.0))))
        except SchemaEvolvedError:
            await again(node)
        except (UnavailableError, UnknownOutcomeError, InvalidError):
            continue


async def read_long(shared: Shared, node: Node) -> None:
    """Choose batches under a hold and read them much later: their objects must exist while the hold lives.

    Some holds are short and expire during the read: then its objects may be gone, but the rows read are still exact.
    """
    source = shared.world.source
    while True:
        await asyncio.sleep(source.uniform(0, 0.4))
        reader = f"long-{shared.number()}"
        ttl_ms = HOLD_MS if source.random() < 0.6 else source.randint(20, 400)
        shard = node.shard
        try:
            since, upper = await shared.frontiers.read(shard)
            if upper <= since:
                continue
            as_of = source.randrange(since, upper)
            if shared.fault == "choose-before-hold":
                chosen = await shard.batches_until(as_of)
                for _ in range(source.randint(0, 20)):  # most often until the chosen batches were merged
                    await asyncio.sleep(0.1)
                    await shard.frontiers()
                    if not {*chosen} <= {*shard.state.batches}:
                        break
            expires_ms = node.actor.clock.now_ms() + ttl_ms
            await shard.set_hold(reader, as_of, ttl_ms)
            if shared.fault != "choose-before-hold":
                chosen = await shard.batches_until(as_of)
        except (UnavailableError, UnknownOutcomeError, InvalidError):
            continue
        if ttl_ms < HOLD_MS:
            await asyncio.sleep(ttl_ms / 1000 + source.uniform(0, 1.0))
        while True:
            await asyncio.sleep(source.uniform(0, 0.8))
            try:
                updates = await shard.reader.read_batches(chosen, 0, as_of + 1)
                shared.reads.append((as_of, rows_of(sum_contents(shard.schema, updates))))
                if source.random() < 0.7:
                    await shard.release_hold(reader)  # the other holds lapse
                break
            except SchemaEvolvedError:
                await again(node)
                break
            except MissingError as error:
                if node.actor.clock.now_ms() < expires_ms:
                    raise Violated(f"an object went under a hold: as_of={as_of} {error.message}") from error
                shared.world.trace(f"{node.actor.life} a hold expired under a read at {as_of}")
                break
            except (UnavailableError, UnknownOutcomeError):
                continue


async def listen(shared: Shared, node: Node) -> None:
    """Listen from the durable position of the previous life; progress and rows are stored in one step."""
    while True:
        try:
            async for delta in node.shard.listen(shared.heard_to):
                if delta.lower != shared.heard_to:
                    raise Violated(f"a listener was given [{delta.lower}, {delta.upper}) at {shared.heard_to}")
                shared.heard.update(updates_of(delta.rows))
                shared.heard_to = delta.upper
        except SchemaEvolvedError:
            await again(node)
        except (UnavailableError, UnknownOutcomeError, HistoryLostError):
            # Without a hold the chosen objects may be collected. Since stays below this position, so choose again.
            await asyncio.sleep(0.05)


async def again(node: Node) -> None:
    """Continue under the newer schema of the shard, as soon as it can be read."""
    try:
        await node.reopen()
    except (UnavailableError, UnknownOutcomeError):
        await asyncio.sleep(0.05)
