"""A captured table whose description changed while its pipeline ran: its shard follows, and its unit opens it anew.

records of a version that the reader does not know  →  the table comes to the time before them, and is opened again
the catalogue has a newer version, and no record    →  seen every LOOK_S seconds, and opened again
a copy that the shard would lose something by       →  refused with the difference, until somebody accepts it for this
                                                       very shard: then columns are retired, or the shard is made anew
"""

from __future__ import annotations

import structlog
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError
from tidemill.metastore.catalogue import Accepted, Catalogue
from tidemill.shards.api import SchemaEvolvedError
from tidemill.shards.parts.pg_columns import as_held
from tidemill.shards.parts.schema_evolution import changes_to
from tidemill.shards.registry import drop_created, registered
from tidemill.shards.state.commands import Create
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.stores import Stores

LOOK_S = 2.0

log = structlog.get_logger()


class SourceSchemaGrewError(SchemaEvolvedError):
    """The source has a newer version of the table's description than it was opened with."""


async def held(stores: Stores, name: str, feed: TopicFeed) -> TopicFeed:
    """The feed with the types that columns of the shard have already, if it is there: see `as_held`.

    Raises Unavailable, Unknown, Closed.
    """
    if all(column.type != "timestamp_ntz" for column in feed.schema.columns):
        return feed
    try:
        shard = await stores.shard(name)
    except MissingError:
        return feed
    have = shard.schema
    await shard.aclose()
    columns = as_held(feed.schema.columns, have)
    if columns == feed.schema.columns:
        return feed
    kept = [new.name for old, new in zip(feed.schema.columns, columns, strict=True) if old != new]
    log.warning("timestamps without a zone are read as UTC, as the shard has them", shard=name, columns=kept)
    known = tuple(as_held(version, have) for version in feed.known)
    return replace(feed, schema=replace(feed.schema, columns=columns), known=known)


async def grow(stores: Stores, name: str, feed: TopicFeed) -> None:
    """Give a shard that exists the columns it lacks, with what the source's older rows hold in them, and do what was
    accepted for it. What it cannot become is refused by who opens it. Raises Unavailable, Unknown, Closed."""
    found = await registered(stores.consensus, name)
    if found is None or not isinstance(found[0], Create):
        return
    created = found[0]
    accepted = next((a for a in feed.accepted if a.shard_id == created.shard_id), Accepted(created.shard_id))
    if await _follows(stores, name, feed, accepted):
        return
    # This very shard, for which it was accepted: a peer may have made it anew already, under the same name.
    log.warning("a shard is made anew, as was accepted", shard=name, shard_id=created.shard_id, table=feed.table)
    await drop_created(stores.consensus, stores.objects, stores.clock, stores.rand, created)


async def _follows(stores: Stores, name: str, feed: TopicFeed, accepted: Accepted) -> bool:
    """False: it cannot, and is to be dropped for it; so does one whose drop was cut off."""
    try:
        shard = await stores.shard(name)
    except MissingError:
        return not accepted.anew
    try:
        if shard.shard_id != accepted.shard_id:
            return True  # a peer was first
        wanted = replace(feed.schema, columns=feed.known[-1]) if feed.known else feed.schema
        changes = changes_to(shard.schema, wanted, accepted.gone)
        if changes.add or changes.retire:
            await shard.evolve(changes)
    except InvalidError:
        return not accepted.anew
    finally:
        await shard.aclose()
    return True


async def has_grown(catalogue: Catalogue, capture: str, table: str, feed: TopicFeed) -> bool:
    """Whether the table's description has more versions than `feed` knows of; may be a little late."""
    row = await catalogue.table(capture, table, fresh=False)
    return row is not None and row.version > max(1, len(feed.known))
