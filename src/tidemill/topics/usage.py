"""Find the users of a topic, which would fail if it were deleted."""

from __future__ import annotations

from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow


async def find_topic_users(catalogue: Catalogue, topic: TopicRow) -> list[str]:
    """List the users by name: `capture:<name>` if the topic is one of its tables, `pipeline:<name>` if it reads the
    topic.

    Raises Unavailable.
    """
    tables = [table for table in await catalogue.all_tables() if table.topic == topic.name]
    found = sorted({f"capture:{table.capture}" for table in tables})
    sources = {f"topic:{topic.name}", *(f"capture:{table.capture}:{table.table}" for table in tables)}
    for pipeline in await catalogue.list(PipelineRow):
        if sources & set(pipeline.tables.values()):
            found.append(f"pipeline:{pipeline.name}")
    return sorted(found)
