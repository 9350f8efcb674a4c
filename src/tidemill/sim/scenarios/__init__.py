"""Scenarios: what happens in a world. Each opens with its fault model and its oracle; `ROOMS` lists them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tidemill.base.errors import Invalid
from tidemill.sim.world import World

Scenario = Callable[[World], Awaitable[None]]

FAULTS: dict[str, tuple[str, str]] = {
    "seed000": ("topics", "a producer's place in line is reserved after the upload"),
    "first-region": ("topics", "the first partition in an object decides whether it is collected"),
    "undecided": ("topics", "an object that no log names yet is collected while its batches are on their way"),
    "unordered-connection": ("topics", "batches without producer id are placed as their uploads end"),
    "blind-retry": ("consensus", "a client repeats an append whose answer was lost without looking it up"),
    "stranded-rows": ("shards", "a lagging writer appends rows whose times the shard has passed (seed 001)"),
    "choose-before-hold": ("shards", "a reader chooses its batches before its hold is there"),
    "collect-held": ("shards", "collection passes over the holds of readers"),
    "consolidate-above-since": ("shards", "compaction sums up times that readers still tell apart"),
    "restash-below-upper": ("shards", "an upsert keeps commands below the upper for later (seed 001)"),
    "trim-batch": ("shards", "an upsert that lost a race appends the later times of its batch as they are"),
    "drain-twice": ("shards", "an upsert drains several times at one upper, each against the same contents"),
    "trust-checkpoint": ("shards", "an upsert that restarts reads on from its own checkpoint, not from the upper"),
    "seed002": ("capture", "a flush inside a transaction is reported at once, not aligned at its commit"),
    "early-keepalive": ("capture", "a commit does not take back that everything seen is confirmed"),
    "early-confirm": ("capture", "the topic writer reports a commit flushed before a binding covers it"),
    "early-boundary": ("capture", "a commit is bound when its records were sent, before they are durable"),
    "lost-notice": ("capture", "now and then a flush notice of the topic writer gets lost"),
    "lower-manifest": ("metastore", "the log takes a manifest below the stored one"),
    "forget-delta": ("metastore", "a reset forgets the deltas of seqno and epoch"),
    "replay-at-persisted": ("metastore", "a new leader takes the batch after the persisted seqno for persisted"),
    "silent-reject": ("metastore", "a manifest that the log refused is reported as written"),
    "gc-newer-epoch": ("metastore", "collection deletes files of a newer epoch"),
    "no-keeper": ("calendar", "nobody takes away what is no longer needed"),
    "guessed-outcome": ("catalogue", "a row's write of unknown outcome is taken for one that did not happen"),
    "stale-read": ("consensus", "a client answers some reads of a register from memory"),
}
"""Planted faults: name → (room in which it must be found, what is wrong)."""

ROOMS = ("consensus", "metastore", "catalogue", "topics", "shards", "capture", "calendar")


def scenario(room: str, fault: str = "") -> Scenario:
    """The scenario of a room, with a planted fault if named. Raises Invalid for an unknown name."""
    if fault and fault not in FAULTS:
        raise Invalid(f"There is no such planted fault: fault={fault}.", fix=f"Use one of {', '.join(FAULTS)}.")
    match room:
        case "consensus":
            from tidemill.sim.scenarios import consensus

            return lambda world: consensus.run(world, fault)
        case "metastore":
            from tidemill.sim.scenarios import metastore

            return lambda world: metastore.run(world, fault)
        case "catalogue":
            from tidemill.sim.scenarios import catalogue

            return lambda world: catalogue.run(world, fault)
        case "topics":
            from tidemill.sim.scenarios import topics

            return lambda world: topics.run(world, fault)
        case "capture":
            from tidemill.sim.scenarios import capture, capture_topics

            # Half of the worlds each: consumers that flush in the middle of transactions, and the real topic writer.
            def run(world: World) -> Awaitable[None]:
                ours = fault in capture_topics.FAULTS or (not fault and world.seed % 2 == 1)
                return capture_topics.run(world, fault) if ours else capture.run(world, fault)

            return run
        case "calendar":
            from tidemill.sim.scenarios import calendar

            return lambda world: calendar.run(world, fault)
        case "shards":
            from tidemill.sim.scenarios import shards

            return lambda world: shards.run(world, fault)
    raise Invalid(f"There is no such room to simulate: room={room}.", fix=f"Use one of {', '.join(ROOMS)} or all.")
