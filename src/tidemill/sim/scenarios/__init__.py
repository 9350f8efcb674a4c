"""Scenarios: what happens in a world. Each opens with its fault model and its oracle; `ROOMS` lists them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tidemill.base.errors import Invalid
from tidemill.sim.world import World

Scenario = Callable[[World], Awaitable[None]]

FAULTS: dict[str, tuple[str, str]] = {
    "seed000": ("topics", "a producer's place in line is reserved after the upload"),
    "blind-retry": ("consensus", "a client repeats an append whose answer was lost without looking it up"),
    "stranded-rows": ("shards", "a lagging writer appends rows whose times the shard has passed (seed 001)"),
    "seed002": ("capture", "a flush inside a transaction is reported at once, not aligned at its commit"),
    "early-keepalive": ("capture", "a commit does not take back that everything seen is confirmed"),
    "lower-manifest": ("metastore", "the log takes a manifest below the stored one"),
    "forget-delta": ("metastore", "a reset forgets the deltas of seqno and epoch"),
    "replay-at-persisted": ("metastore", "a new leader takes the batch after the persisted seqno for persisted"),
    "silent-reject": ("metastore", "a manifest that the log refused is reported as written"),
    "gc-newer-epoch": ("metastore", "collection deletes files of a newer epoch"),
    "guessed-outcome": ("catalogue", "a row's write of unknown outcome is taken for one that did not happen"),
    "stale-read": ("consensus", "a client answers some reads of a register from memory"),
}
"""Planted faults: name → (room in which it must be found, what is wrong)."""

ROOMS = ("consensus", "metastore", "catalogue", "topics", "shards", "capture")


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
            from tidemill.sim.scenarios import capture

            return lambda world: capture.run(world, fault)
        case "shards":
            from tidemill.sim.scenarios import shards

            return lambda world: shards.run(world, fault)
    raise Invalid(f"There is no such room to simulate: room={room}.", fix=f"Use one of {', '.join(ROOMS)} or all.")
