"""`tidemill topic`: create, list, describe and delete topics."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.base.errors import Invalid, Missing
from tidemill.cli.context import ConfigOption, JsonOption, Stores, print_json, stores
from tidemill.metastore.catalogue import TopicRow

app = typer.Typer(help="Create, list, describe and delete topics.", no_args_is_help=True)
Really = Annotated[bool, typer.Option("--yes-really", help="Delete it though a capture or a pipeline uses it.")]
Name = Annotated[str, typer.Argument(help="Topic name.")]


@app.command("create")
def create(
    name: Name,
    partitions: Annotated[int, typer.Option(help="Number of partitions.")] = 4,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a topic."""
    with stores(config) as opened:
        row = opened.portal.call(opened.catalogue.create_topic(name, partitions))
        _print([_describe(opened, row)], as_json)


@app.command("list")
def list_topics(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the topics with their record counts."""
    with stores(config) as opened:
        rows = opened.portal.call(opened.catalogue.list(TopicRow))
        _print([_describe(opened, row) for row in rows], as_json)


@app.command("describe")
def describe(name: Name, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show one topic and the high watermark of each partition."""
    with stores(config) as opened:
        _print([_describe(opened, _find(opened, name))], as_json)


@app.command("delete")
def delete(name: Name, really: Really = False, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Delete a topic; a later topic of this name has a new id. One that a capture or a pipeline uses is refused."""
    from tidemill.topics.uses import users_of

    with stores(config) as opened:
        row = _find(opened, name)
        users = opened.portal.call(users_of(opened.catalogue, row))
        if users and not really:
            raise Invalid(
                f"the topic is in use: topic={name} by={', '.join(users)}.",
                fix="They stop working without it. To delete it all the same: --yes-really",
            )
        opened.portal.call(opened.catalogue.delete(TopicRow, name))
        if as_json:
            print_json({"deleted": name, "topic_id": row.topic_id})
        else:
            print(f"deleted {name}")


def _find(opened: Stores, name: str) -> TopicRow:
    row = opened.portal.call(opened.catalogue.get(TopicRow, name))
    if row is None:
        raise Missing(f"no such topic: topic={name}.", fix="List them with: tidemill topic list")
    return row


def _describe(opened: Stores, row: TopicRow) -> dict[str, object]:
    from tidemill.topics.reader import PartitionReaderImpl

    reader = PartitionReaderImpl(opened.consensus, opened.objects)
    ends = [opened.portal.call(reader.high_watermark(row.topic_id, p)) for p in range(row.partitions)]
    return {
        "topic": row.name,
        "topic_id": row.topic_id,
        "kind": row.kind,
        "partitions": row.partitions,
        "high_watermarks": ends,
        "records": sum(ends),
    }


def _print(rows: list[dict[str, object]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print(f"{row['topic']}  {row['kind']}  partitions={row['partitions']}  records={row['records']}")
        if len(rows) == 1:
            print(f"  id {row['topic_id']}  high watermarks {row['high_watermarks']}")
