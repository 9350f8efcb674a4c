"""Growth of a captured table's schema while its pipeline runs: its shard evolves, and its unit reopens it.

a record has a version unknown to the reader       →  the table advances to the time before it, and is reopened
the catalogue has a newer version, without records →  noticed every GROWTH_CHECK_S, and the table is reopened
a re-snapshot would lose something of the shard    →  rejected with the difference, until an operator accepts it for
                                                      this very shard: then columns are retired, or the shard is
                                                      re-created
"""

from __future__ import annotations

import structlog
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError
from tidemill.metastore.catalogue import AcceptedSchemaChange, Catalogue
from tidemill.shards.api import SchemaEvolvedError, ShardSchema
from tidemill.shards.parts.pg_columns import has_other_forms, with_existing_types
from tidemill.shards.parts.schema_evolution import schema_changes
from tidemill.shards.registry import drop_shard, read_registration
from tidemill.shards.state.commands import Create
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.stores import Stores

GROWTH_CHECK_S = 2.0

log = structlog.get_logger()


class SourceSchemaGrewError(SchemaEvolvedError):
    """The source has a newer version of the table's description than the one it was opened with."""


async def keep_shard_types(stores: Stores, name: str, feed: TopicFeed) -> TopicFeed:
    """Return the feed with the types that columns of an existing shard already have: see `with_existing_types`.

    Raises UnavailableError, UnknownOutcomeError, ClosedError.
    """
    if not has_other_forms(feed.schema):
        return feed
    try:
        shard = await stores.shard(name)
    except MissingError:
        return feed
    have = shard.schema
    await shard.aclose()
    columns = with_existing_types(feed.schema.columns, have)
    if columns == feed.schema.columns:
        return feed
    kept = [new for old, new in zip(feed.schema.columns, columns, strict=True) if old != new]
    if instants := [column.name for column in kept if column.type == "timestamp"]:
        log.warning("timestamps without a zone are read as UTC, as in the table", shard=name, columns=instants)
    if texts := [column.name for column in kept if column.type == "string"]:
        log.info("arrays are text, as in the table", shard=name, columns=texts)
    known = tuple(with_existing_types(version, have) for version in feed.known)
    return replace(feed, schema=replace(feed.schema, columns=columns), known=known)


def feed_for_shard(feed: TopicFeed, have: ShardSchema) -> TopicFeed:
    """Return the feed, decoded to the columns of its shard, which has evolved to the feed's."""
    # Columns that the source has dropped are in no record, in any version.
    gone = any(column.retired for column in have.columns)
    return replace(feed, schema=have, known=feed.known or ((feed.schema.columns,) if gone else ()))


async def evolve_shard(stores: Stores, name: str, feed: TopicFeed) -> None:
    """Add the columns that an existing shard lacks, with the defaults of the source's older rows, and apply accepted
    changes. Changes that the shard cannot make are rejected later, when it is opened. Raises UnavailableError,
    UnknownOutcomeError, ClosedError."""
    found = await read_registration(stores.consensus, name)
    if found is None or not isinstance(found[0], Create):
        return
    created = found[0]
    accepted = next(
        (a for a in feed.accepted if a.shard_id == created.shard_id), AcceptedSchemaChange(created.shard_id)
    )
    if await _try_evolve(stores, name, feed, accepted):
        return
    # Only this very shard, for which it was accepted: a peer may already have re-created it under the same name.
    log.warning("re-creating a table, as accepted", shard=name, shard_id=created.shard_id, table=feed.table)
    await drop_shard(stores.consensus, stores.objects, stores.clock, stores.rand, created)


async def _try_evolve(stores: Stores, name: str, feed: TopicFeed, accepted: AcceptedSchemaChange) -> bool:
    """Evolve the shard; False if it cannot and must be dropped, also if an earlier drop was interrupted."""
    try:
        shard = await stores.shard(name)
    except MissingError:
        return not accepted.anew
    try:
        if shard.shard_id != accepted.shard_id:
            return True  # a peer was first
        wanted = replace(feed.schema, columns=feed.known[-1]) if feed.known else feed.schema
        changes = schema_changes(shard.schema, wanted, accepted.gone)
        if changes.add or changes.retire:
            await shard.evolve(changes)
    except InvalidError:
        return not accepted.anew
    finally:
        await shard.aclose()
    return True


async def has_grown(catalogue: Catalogue, capture: str, table: str, feed: TopicFeed) -> bool:
    """Return whether the table's description has more versions than `feed` knows; may lag a little."""
    row = await catalogue.table(capture, table, fresh=False)
    return row is not None and row.version > max(1, len(feed.known))
