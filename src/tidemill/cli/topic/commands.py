"""`tidemill topic`: topics and their configs. Module `records` produces and consumes records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError
from tidemill.cli.context import (
    DRY_RUN,
    ConfigOption,
    DryRunOption,
    OldForce,
    OpenStores,
    YesOption,
    confirm,
    either_name,
    open_stores,
    preview,
)
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column
from tidemill.cli.topic.lost import lost
from tidemill.cli.topic.records import consume, produce
from tidemill.metastore.catalogue import TopicRow, with_partitions

if TYPE_CHECKING:
    from tidemill.topics.config.alter import ConfigChange

app = typer.Typer(help="Manage topics: partitions, configs and records.", no_args_is_help=True)
Set = Annotated[list[str] | None, typer.Option("--set", help="Set a config, by Kafka's name: NAME=VALUE. Repeatable.")]
Unset = Annotated[list[str] | None, typer.Option("--unset", help="Reset a config to its default. Repeatable.")]
ForceDelete = Annotated[bool, typer.Option("--force", help="Delete it even if a capture or a pipeline uses it.")]
Name = Annotated[str, typer.Argument(help="Topic name.")]

app.command("produce")(produce)
app.command("consume")(consume)
app.command("lost")(lost)


@app.command("create")
def create(
    name: Name,
    partitions: Annotated[int, typer.Option(help="Number of partitions.")] = 4,
    settings: Set = None,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Create a topic."""
    from tidemill.topics.config.configs import parse_topic_config

    configs = dict(_parse_setting(text) for text in settings or ())
    parse_topic_config(configs)
    with open_stores(config, create=True) as opened:
        row = opened.portal.call(opened.catalogue.create_topic(name, partitions, config=configs))
        _print_topic(_topic_fields(opened, row), out)


@app.command("alter")
def alter(
    name: Name,
    partitions: Annotated[int | None, typer.Option(help="New number of partitions; it can only grow.")] = None,
    settings: Set = None,
    unset: Unset = None,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Add partitions to a topic or change its configs: all changes, or none. Nodes apply them within a moment."""
    from tidemill.topics.config.alter import apply_changes

    changes = parse_config_changes(settings, unset)
    if partitions is None and not changes:
        raise InvalidError("nothing to change.", fix="Give --partitions, --set or --unset.")

    def changed(row: TopicRow) -> TopicRow:
        if row.kind == "capture":
            raise InvalidError(f"the topic of a captured table cannot be changed: topic={name}.")
        row = replace(row, config=apply_changes(row.config, changes, typed=True))
        return row if partitions is None else with_partitions(row, partitions)

    with open_stores(config) as opened:
        if dry_run:
            row = changed(_find_topic(opened, name))
            if out.is_text:
                print("dry run: the topic after the change")
        else:
            _find_topic(opened, name)
            row = opened.portal.call(opened.catalogue.change_topic(name, changed))
        _print_topic(_topic_fields(opened, row), out, dry_run=dry_run)


def parse_config_changes(settings: list[str] | None, unset: list[str] | None) -> list[ConfigChange]:
    """Return the changes that --set and --unset request. Raises InvalidError."""
    from tidemill.topics.config.alter import AlterOp

    changes: list[ConfigChange] = [(key, AlterOp.SET, value) for key, value in map(_parse_setting, settings or ())]
    return changes + [(key, AlterOp.DELETE, None) for key in unset or ()]


def _parse_setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidError(f"invalid config: {text!r}.", fix="Write it as NAME=VALUE, e.g. --set retention.ms=86400000")
    return key, value


@app.command("list")
def list_topics(config: ConfigOption = None, out: Output = TABLE) -> None:
    """List the topics with their record counts."""
    with open_stores(config) as opened:
        rows = opened.portal.call(opened.catalogue.list(TopicRow))
        fields = [_topic_fields(opened, row) for row in rows]
    columns = [Column(name) for name in ("topic", "kind", "partitions", "records")]
    out.rows(fields, columns, empty="no topics")


@app.command("describe")
def describe(name: Name, config: ConfigOption = None, out: Output = TABLE) -> None:
    """Show one topic and the high watermark of each partition."""
    with open_stores(config) as opened:
        _print_topic(_topic_fields(opened, _find_topic(opened, name)), out)


@app.command("delete")
def delete(
    name: Name,
    force: ForceDelete = False,
    yes_really: OldForce = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Delete a topic. A later topic of this name has a new id. A topic that a capture or a pipeline uses is refused."""
    from tidemill.topics.lifecycle.deletion import find_topic_users

    force = either_name(force, yes_really, "--force", "--yes-really")
    with open_stores(config) as opened:
        row = _find_topic(opened, name)
        users = opened.portal.call(find_topic_users(opened.catalogue, row))
        if users and not force:
            raise InvalidError(
                f"the topic is in use: topic={name} by={', '.join(users)}.",
                fix="They stop working without it. To delete it anyway: --force",
            )
        if dry_run:
            count = _topic_fields(opened, row)["records"]
            deleted = {"deleted": name, "topic_id": row.topic_id, "records": count}
            preview(out, deleted, f"delete topic {name} and its {count:,} records")
            return
        confirm(f"Delete topic {name} and its records?", yes=yes or force, out=out)
        opened.portal.call(opened.catalogue.delete_topic(row))
    out.one({"deleted": name, "topic_id": row.topic_id}, f"deleted {name}")


def _find_topic(opened: OpenStores, name: str) -> TopicRow:
    row = opened.portal.call(opened.catalogue.get(TopicRow, name))
    if row is None:
        raise MissingError(f"no such topic: topic={name}.", fix="List them with: tidemill topic list")
    return row


def _topic_fields(opened: OpenStores, row: TopicRow) -> dict[str, Any]:
    from tidemill.topics.partition_reader import LogPartitionReader

    reader = LogPartitionReader(opened.consensus, opened.objects)
    ends = [opened.portal.call(reader.high_watermark(row.topic_id, p)) for p in range(row.partitions)]
    return {
        "topic": row.name,
        "topic_id": row.topic_id,
        "kind": row.kind,
        "partitions": row.partitions,
        "configs": row.config,
        "high_watermarks": ends,
        "records": sum(ends),
    }


def _print_topic(row: dict[str, Any], out: Output, *, dry_run: bool = False) -> None:
    """Print one topic: as JSON the same list as `topic list`, as rows one for each partition."""
    if out.is_text:
        print(f"{row['topic']}  {row['kind']}  id {row['topic_id']}  records {row['records']:,}")
        for key, value in sorted(row["configs"].items()):
            print(f"  {key} = {value}")
    ends = enumerate(row["high_watermarks"])
    mark = DRY_RUN if dry_run else {}
    partitions = [{**mark, "topic": row["topic"], "partition": index, "high_watermark": end} for index, end in ends]
    out.rows(partitions, [Column("partition"), Column("high watermark", "high_watermark")], value=[{**mark, **row}])
