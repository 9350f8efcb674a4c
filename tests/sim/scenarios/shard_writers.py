"""Writers of separate rows: each repeats an append with its token until it knows the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sim.oracles.shards import DEFAULT_N, Attempt, Model, Update
from sim.scenarios.shard_nodes import Node, Shared, build, table
from sim.scenarios.shard_readers import again
from sim.world import Actor, Violated, World
from tidemill.base.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidemill.shards.api import SchemaEvolvedError


class Writers(Shared):
    def __init__(self, world: World, fault: str) -> None:
        super().__init__(world, fault)
        self.remaining: dict[str, int] = {}
        self.rows: dict[str, list[Update]] = {}
        """Acknowledged insertions of each writer that are not retracted."""

    def cast(self) -> list[Actor[Node]]:
        source = self.world.source
        writers = [Actor(self.world, f"writer-{i}", build) for i in range(source.randint(1, 3))]
        for writer in writers:
            self.remaining[writer.name] = source.randint(2, 6)
            self.rows[writer.name] = []
        return writers

    async def model(self, stands: Sequence[Attempt]) -> Model:
        return Model(update for attempt in stands for update in attempt.updates)

    async def write(self, node: Node) -> None:
        """Append until this writer's quota is done."""
        world, source, name = self.world, self.world.source, node.actor.name
        while self.remaining[name] > 0:
            fresh = source.random() < 0.6
            try:
                _, lower = await node.shard.frontiers(fresh=fresh)
                upper = lower + source.randint(1, 20)
                attempt = Attempt(self.token(), lower, upper, self._updates(node, lower, upper))
                rows = table(node.shard.schema, attempt.updates)
                parts = [await node.shard.write_part(rows)] if attempt.updates else []
            except (UnavailableError, UnknownOutcomeError):
                await asyncio.sleep(0.05)
                continue
            self.attempts[attempt.token] = attempt
            while True:
                try:
                    await node.shard.compare_and_append(lower, upper, parts, attempt.token)
                except ConflictError as conflict:
                    attempt.outcome = "refused"
                    if not isinstance(conflict.current, int) or (conflict.current <= lower and fresh):
                        current = conflict.current
                        raise Violated(f"a conflict does not say what is there: current={current}") from conflict
                    if self.fault == "stranded-rows":
                        lower, upper = conflict.current, conflict.current + 5
                        attempt = Attempt(self.token(), lower, upper, attempt.updates)
                        self.attempts[attempt.token] = attempt
                        continue
                except UnknownOutcomeError:
                    await asyncio.sleep(0.05)
                    continue
                except UnavailableError:
                    attempt.outcome = "refused"
                    await asyncio.sleep(0.05)
                except SchemaEvolvedError:
                    attempt.outcome = "refused"
                    await again(node)
                else:
                    attempt.outcome = "ok"
                    self.remaining[name] -= 1
                    self.rows[name] += [update for update in attempt.updates if update[4] > 0]
                break
            world.trace(f"{node.actor.life} append [{lower}, {upper}) ×{len(attempt.updates)} {attempt.outcome}")
            await asyncio.sleep(source.uniform(0, 0.1) if source.random() < 0.5 else 0)

    def _updates(self, node: Node, lower: int, upper: int) -> tuple[Update, ...]:
        """Return new rows, some large enough to become objects, and retractions of this writer's rows."""
        source, name = self.world.source, node.actor.name
        evolved = node.shard.schema.version > 1
        out: list[Update] = []
        for _ in range(source.choice((0, 1, 1, 2, 4))):
            value = self.world.filler if source.random() < 0.15 else "v"
            n = source.choice((DEFAULT_N, 8, None)) if evolved else DEFAULT_N
            out.append((f"{name}-{self.number()}", value, n, source.randrange(lower, upper), 1))
        if self.rows[name] and source.random() < 0.4:
            # Forget them now, independent of the append's outcome: a row must not be retracted twice.
            key, value, n, _, _ = self.rows[name].pop(source.randrange(len(self.rows[name])))
            out.append((key, value, n, source.randrange(lower, upper), -1))
        return tuple(out)
