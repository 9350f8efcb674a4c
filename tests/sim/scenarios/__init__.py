"""Scenarios: the events of a world. Each module describes its fault model and its oracle; `ROOMS` lists the rooms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sim.world import World
from tidemill.base.errors import InvalidError

Scenario = Callable[[World], Awaitable[None]]

FAULTS: dict[str, tuple[str, str]] = {
    "seed000": ("topics", "a producer's place in line is reserved after the upload"),
    "first-region": ("topics", "the first partition in an object decides whether it is collected"),
    "undecided": ("topics", "an object that no log names yet is collected while its batches are in flight"),
    "one-report": ("topics", "objects are collected although the log of one partition could not be read"),
    "forget-before-add": ("topics", "logs forget batches that move into L1 before their extents are stored"),
    "release-failed": ("topics", "the successors of a failed batch continue as if it were in the log"),
    "no-handover-gate": ("topics", "a node that becomes leader forgets the batches that it rejected before"),
    "fence-before-redeem": ("topics", "a batch occupies a place in the log while it waits for its turn"),
    "first-data-base": ("topics", "an extent begins at its first record, not at the end of the extent before it"),
    "clean-last": ("topics", "compaction removes the last batch, too: a reader never reaches the end"),
    "aborted-supersedes": ("topics", "an aborted record supersedes an older record of its key"),
    "untold-leader": ("topics", "a fenced leader learns of it when it writes, not before"),
    "forgotten-log": ("topics", "the log of a deleted topic is never ended"),
    "below-start": ("topics", "the first offset of a time is below the log start, which is in its batch"),
    "told-early": ("topics", "readers see a batch while its append is in flight"),
    "unordered-connection": ("topics", "batches without producer id are placed in the order of their uploads' ends"),
    "marker-before-data": ("transactions", "a permit to begin a transaction outlives the transaction's marker"),
    "untold-offsets": (
        "transactions",
        "a group's offsets count as written before they are: lost at a coordinator move",
    ),
    "stays-replaced": ("transactions", "a group's coordinator reports that it was replaced, and stays"),
    "checked-once": ("transactions", "offsets of a member are stored although the group has continued without it"),
    "blind-retry": ("consensus", "a client repeats an append whose answer was lost without looking it up"),
    "stranded-rows": ("shards", "a lagging writer appends rows whose times the shard has passed (seed 001)"),
    "choose-before-hold": ("shards", "a reader chooses its batches before its hold is set"),
    "collect-held": ("shards", "collection ignores the holds of readers"),
    "consolidate-above-since": ("shards", "compaction sums times that readers still distinguish"),
    "restash-below-upper": ("shards", "an upsert keeps commands below the upper for later (seed 001)"),
    "trim-batch": ("shards", "an upsert that lost a race appends the later times of its batch unchanged"),
    "drain-twice": ("shards", "an upsert drains several times at one upper, each against the same contents"),
    "trust-checkpoint": ("shards", "an upsert that restarts continues from its own checkpoint, not from the upper"),
    "stale-vector": ("lake", "a deletion vector of an earlier publication is listed, although it changed"),
    "unheld-snapshot": ("lake", "the parts of a published snapshot are not held against collection"),
    "both-publish": ("lake", "two nodes publish at once, and both count as published"),
    "wrong-tag": ("lake", "a tag names another time than that of its contents"),
    "seed002": ("capture", "a flush inside a transaction is reported immediately, not aligned at its commit"),
    "near-miss": ("capture", "a consumer is complete only when it flushed exactly the position sent to it"),
    "early-keepalive": ("capture", "a commit does not revoke the state that everything seen is confirmed"),
    "early-register": ("capture", "a commit is registered before its delivery, for consumers that had a part of it"),
    "no-hold-back": ("capture", "a full fragment includes the newest change, and leaves no position for the commit"),
    "late-publication": ("capture", "a table is published after its snapshot was read, not before"),
    "late-consumer": ("capture", "a shape gets changes from the time of its snapshot, not from before"),
    "early-confirm": ("capture", "the topic writer reports a commit flushed before a binding covers it"),
    "early-boundary": ("capture", "a commit is bound when its records were sent, before they are durable"),
    "unheld-copy": ("capture", "WAL is released during the copy of a table without a side topic"),
    "shown-twice": ("capture", "changes that the first snapshot of a copy shows go to the side topic too"),
    "joined-ahead": ("capture", "a copied table joins the stream beyond the end of its side topic"),
    "late-stop": ("capture", "a full side topic ends below its own contents"),
    "unseen-fork": ("capture", "the history of the database is not compared with the captured history"),
    "kept-positions": ("capture", "shapes continue with the positions of an earlier history"),
    "early-batch": ("capture", "a batch of transactions is registered as its last one only"),
    "torn-binding": ("capture", "the binding of a batch is before the last row of its last transaction"),
    "early-wake": ("capture", "the readers of a shape are woken before the items that they wait for are visible"),
    "lost-notice": ("capture", "some flush notices of the topic writer are lost"),
    "late-tombstone": ("capture", "a row that leaves a key writes a tombstone even if another row has taken the key"),
    "confirm-before-flush": ("capture", "data in a flush of shape logs counts as durable before it is"),
    "trusted-file": ("capture", "a file of shape logs is restored although another process captured in between"),
    "late-name": ("capture", "the names of the taps are written some time after the stream began"),
    "route-before-restore": ("capture", "changes are routed while shape logs are still being restored"),
    "untrimmed-restore": ("capture", "a shape log from disk accepts changes again that it already has"),
    "lower-manifest": ("metastore", "the log accepts a manifest below the stored one"),
    "forget-delta": ("metastore", "a reset forgets the deltas of seqno and epoch"),
    "replay-at-persisted": ("metastore", "a new leader treats the batch after the persisted seqno as persisted"),
    "silent-reject": ("metastore", "a manifest that the log rejected is reported as written"),
    "gc-newer-epoch": ("metastore", "collection deletes files of a newer epoch"),
    "moved-head": ("metastore", "no client notices that consensus failed over to a standby that was behind"),
    "still-acknowledges": ("buckets", "a node does not check who owns the bucket before it acknowledges or deletes"),
    "no-keeper": ("calendar", "data that is no longer needed is never deleted"),
    "unfenced-offset": ("groups", "a former coordinator writes offsets of the group: they are lost at a move"),
    "early-assignment": ("groups", "members receive their assignment before it is durable"),
    "empty-handed": ("groups", "a group changes to the consumer protocol without the partitions that its members hold"),
    "stale-commit": ("groups", "commits of the consumer protocol are accepted with any epoch"),
    "guessed-outcome": ("catalogue", "a write of a row with unknown outcome is treated as one that did not happen"),
    "guessed-change": ("registry", "a change with unknown outcome is treated as one that did not happen"),
    "blind-head": ("registry", "a change is written without checking the registry's head"),
    "stale-read": ("consensus", "a client answers some reads of a register from memory"),
}
"""Planted faults: name → (room in which it must be found, description)."""

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
    "lake",
    "capture",
    "calendar",
)


def scenario(room: str, fault: str = "") -> Scenario:
    """Return the scenario of a room, with a planted fault if one is named. Raises InvalidError for an unknown name."""
    if fault and fault not in FAULTS:
        raise InvalidError(f"no such planted fault: fault={fault}.", fix=f"Use one of {', '.join(FAULTS)}.")
    match room:
        case "consensus":
            from sim.scenarios import consensus

            return lambda world: consensus.run(world, fault)
        case "buckets":
            from sim.scenarios import buckets

            return lambda world: buckets.run(world, fault)
        case "metastore":
            from sim.scenarios import metastore

            return lambda world: metastore.run(world, fault)
        case "catalogue":
            from sim.scenarios import catalogue

            return lambda world: catalogue.run(world, fault)
        case "registry":
            from sim.scenarios import registry

            return lambda world: registry.run(world, fault)
        case "topics":
            from sim.scenarios import topics

            return lambda world: topics.run(world, fault)
        case "groups":
            from sim.scenarios import groups

            return lambda world: groups.run(world, fault)
        case "transactions":
            from sim.scenarios import exactly_once, transactions

            # A third of the worlds: workers of a group, which commit its offsets in their transactions.
            def transact(world: World) -> Awaitable[None]:
                joined = fault in exactly_once.FAULTS or (not fault and world.seed % 3 == 2)
                return exactly_once.run(world, fault) if joined else transactions.run(world, fault)

            return transact
        case "capture":
            from sim.scenarios import capture, capture_topics

            # Every fourth world: consumers that flush in the middle of transactions. All others: whole captures.
            both = not fault or (fault in capture.FAULTS and fault in capture_topics.FAULTS)

            def run(world: World) -> Awaitable[None]:
                consumers = world.seed % 4 == 0 if both else fault in capture.FAULTS
                return capture.run(world, fault) if consumers else capture_topics.run(world, fault)

            return run
        case "calendar":
            from sim.scenarios import calendar

            return lambda world: calendar.run(world, fault)
        case "lake":
            from sim.scenarios import lake

            return lambda world: lake.run(world, fault)
        case "shards":
            from sim.scenarios import shards

            return lambda world: shards.run(world, fault)
    raise InvalidError(f"no such room to simulate: room={room}.", fix=f"Use one of {', '.join(ROOMS)} or all.")
