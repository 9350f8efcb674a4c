"""Scenarios: what happens in a world. Each opens with its fault model and its oracle; `ROOMS` lists them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tidemill.base.errors import InvalidError
from tidemill.sim.world import World

Scenario = Callable[[World], Awaitable[None]]

FAULTS: dict[str, tuple[str, str]] = {
    "seed000": ("topics", "a producer's place in line is reserved after the upload"),
    "first-region": ("topics", "the first partition in an object decides whether it is collected"),
    "undecided": ("topics", "an object that no log names yet is collected while its batches are on their way"),
    "one-report": ("topics", "objects are collected though the log of one partition could not be read"),
    "forget-before-add": ("topics", "logs forget what moves into L1 before its extents are there"),
    "release-failed": ("topics", "a batch that failed lets its successors go on, as if it were in the log"),
    "no-handover-gate": ("topics", "what a node refused before it led is forgotten when it comes to lead"),
    "fence-before-redeem": ("topics", "a batch holds a place at the log while it waits for its turn"),
    "first-data-base": ("topics", "an extent begins at its first record, not where the one before it ends"),
    "clean-last": ("topics", "compaction takes the last batch too: who reads to the end never gets there"),
    "aborted-supersedes": ("topics", "a record that was aborted supersedes an older one of its key"),
    "untold-leader": ("topics", "a leader that was deposed learns of it when it writes, not before"),
    "forgotten-log": ("topics", "the log of a deleted topic is never ended"),
    "below-start": ("topics", "the first offset of a time is named below the log's start, which lies within its batch"),
    "told-early": ("topics", "readers are shown a batch while its append is under way"),
    "unordered-connection": ("topics", "batches without producer id are placed as their uploads end"),
    "marker-before-data": ("transactions", "a permit to begin a transaction outlives the transaction's marker"),
    "untold-offsets": (
        "transactions",
        "a group's offsets count as written before they are: lost at a coordinator move",
    ),
    "stays-replaced": ("transactions", "a group's coordinator that finds itself replaced says so, and stays"),
    "checked-once": ("transactions", "offsets of a member are kept though the group went on without it meanwhile"),
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
    "near-miss": ("capture", "a consumer is done when it has flushed exactly what it was sent, not when further"),
    "early-keepalive": ("capture", "a commit does not take back that everything seen is confirmed"),
    "early-register": ("capture", "a commit is registered before it is delivered, for those who had something of it"),
    "no-hold-back": ("capture", "a full fragment takes the newest change along, and the commit has no position left"),
    "late-publication": ("capture", "a table is published when its snapshot was read, not before it is taken"),
    "late-consumer": ("capture", "a shape is offered changes from when its snapshot was taken, not from before"),
    "early-confirm": ("capture", "the topic writer reports a commit flushed before a binding covers it"),
    "early-boundary": ("capture", "a commit is bound when its records were sent, before they are durable"),
    "unheld-copy": ("capture", "WAL is let go while a table is copied that is not set aside"),
    "shown-twice": ("capture", "what the first snapshot of a copy shows is set aside as well"),
    "joined-ahead": ("capture", "a copied table joins the stream beyond what was set aside"),
    "late-stop": ("capture", "an aside that is full ends below what it has"),
    "unseen-fork": ("capture", "nobody compares the history of the database with the one that was captured"),
    "kept-positions": ("capture", "shapes go on with the positions of a history that is over"),
    "lost-notice": ("capture", "now and then a flush notice of the topic writer gets lost"),
    "late-tombstone": ("capture", "a row that leaves a key writes a tombstone, whatever row has taken the key by then"),
    "confirm-before-flush": ("capture", "what a flush of shape logs takes counts as durable before it is"),
    "trusted-file": ("capture", "a file of shape logs is restored, whoever captured in between"),
    "late-name": ("capture", "the names of who follows are written some time after the stream began"),
    "route-before-restore": ("capture", "changes are routed while shape logs are still being restored"),
    "untrimmed-restore": ("capture", "a shape log from disk takes again what it has, when the stream repeats it"),
    "lower-manifest": ("metastore", "the log takes a manifest below the stored one"),
    "forget-delta": ("metastore", "a reset forgets the deltas of seqno and epoch"),
    "replay-at-persisted": ("metastore", "a new leader takes the batch after the persisted seqno for persisted"),
    "silent-reject": ("metastore", "a manifest that the log refused is reported as written"),
    "gc-newer-epoch": ("metastore", "collection deletes files of a newer epoch"),
    "moved-head": ("metastore", "nobody notices that consensus failed over to a standby that was behind"),
    "still-acknowledges": ("buckets", "a node does not ask whose the bucket is before it acknowledges or deletes"),
    "no-keeper": ("calendar", "nobody takes away what is no longer needed"),
    "unfenced-offset": ("groups", "offsets are written by whoever coordinated the group once: lost at a move"),
    "early-assignment": ("groups", "members are told their assignment before it is durable"),
    "empty-handed": ("groups", "a group goes over to the consumer protocol without what its members hold"),
    "stale-commit": ("groups", "commits of the consumer protocol are taken whatever epoch they name"),
    "guessed-outcome": ("catalogue", "a row's write of unknown outcome is taken for one that did not happen"),
    "guessed-change": ("registry", "a change of unknown outcome is taken for one that did not happen"),
    "blind-head": ("registry", "a change is written whatever the registry's head is by then"),
    "stale-read": ("consensus", "a client answers some reads of a register from memory"),
}
"""Planted faults: name → (room in which it must be found, what is wrong)."""

ROOMS = (
    "consensus",
    "buckets",
    "metastore",
    "catalogue",
    "registry",
    "topics",
    "groups",
    "transactions",
    "shards",
    "capture",
    "calendar",
)


def scenario(room: str, fault: str = "") -> Scenario:
    """The scenario of a room, with a planted fault if named. Raises InvalidError for an unknown name."""
    if fault and fault not in FAULTS:
        raise InvalidError(f"There is no such planted fault: fault={fault}.", fix=f"Use one of {', '.join(FAULTS)}.")
    match room:
        case "consensus":
            from tidemill.sim.scenarios import consensus

            return lambda world: consensus.run(world, fault)
        case "buckets":
            from tidemill.sim.scenarios import buckets

            return lambda world: buckets.run(world, fault)
        case "metastore":
            from tidemill.sim.scenarios import metastore

            return lambda world: metastore.run(world, fault)
        case "catalogue":
            from tidemill.sim.scenarios import catalogue

            return lambda world: catalogue.run(world, fault)
        case "registry":
            from tidemill.sim.scenarios import registry

            return lambda world: registry.run(world, fault)
        case "topics":
            from tidemill.sim.scenarios import topics

            return lambda world: topics.run(world, fault)
        case "groups":
            from tidemill.sim.scenarios import groups

            return lambda world: groups.run(world, fault)
        case "transactions":
            from tidemill.sim.scenarios import exactly_once, transactions

            # A third of the worlds: workers of a group, whose offsets are of their transactions.
            def transact(world: World) -> Awaitable[None]:
                joined = fault in exactly_once.FAULTS or (not fault and world.seed % 3 == 2)
                return exactly_once.run(world, fault) if joined else transactions.run(world, fault)

            return transact
        case "capture":
            from tidemill.sim.scenarios import capture, capture_topics

            # Every fourth world: consumers that flush in the middle of transactions. The others: whole captures.
            both = not fault or (fault in capture.FAULTS and fault in capture_topics.FAULTS)

            def run(world: World) -> Awaitable[None]:
                consumers = world.seed % 4 == 0 if both else fault in capture.FAULTS
                return capture.run(world, fault) if consumers else capture_topics.run(world, fault)

            return run
        case "calendar":
            from tidemill.sim.scenarios import calendar

            return lambda world: calendar.run(world, fault)
        case "shards":
            from tidemill.sim.scenarios import shards

            return lambda world: shards.run(world, fault)
    raise InvalidError(f"There is no such room to simulate: room={room}.", fix=f"Use one of {', '.join(ROOMS)} or all.")
