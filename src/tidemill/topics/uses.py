"""Who uses a topic: deleting it under them would end them."""

from __future__ import annotations

from tidemill.metastore.catalogue import CaptureRow, Catalogue, PipelineRow, TopicRow


async def users_of(catalogue: Catalogue, topic: TopicRow) -> list[str]:
    """`capture:<name>` whose table the topic is, `pipeline:<name>` that reads it; by name. Raises Unavailable."""
    found: list[str] = []
    tables: set[str] = set()
    for capture in await catalogue.list(CaptureRow):
        own = [table for table, name in capture.topics.items() if name == topic.name]
        if own:
            found.append(f"capture:{capture.name}")
            tables |= {f"capture:{capture.name}:{table}" for table in own}
    sources = {f"topic:{topic.name}", *tables}
    for pipeline in await catalogue.list(PipelineRow):
        if sources & set(pipeline.tables.values()):
            found.append(f"pipeline:{pipeline.name}")
    return sorted(found)
