"""`tidemill group`: list, describe, alter, reset and delete consumer groups, from durable state."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.base.errors import InvalidError, MissingError
from tidemill.cli.context import (
    DRY_RUN,
    ConfigOption,
    DryRunOption,
    OpenStores,
    YesOption,
    confirm,
    open_stores,
    preview,
)
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column
from tidemill.cli.topic.commands import Set, Unset, parse_config_changes

if TYPE_CHECKING:
    from tidemill.metastore.catalogue import TopicRow
    from tidemill.metastore.rows.groups import GroupMemberRow, GroupOffsetRow, GroupRow

app = typer.Typer(help="List, describe, alter, reset and delete consumer groups.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of the group.")]
Row = dict[str, Any]


@app.command("list")
def list_groups(config: ConfigOption = None, out: Output = TABLE) -> None:
    """List the consumer groups with their members and their lag."""
    from tidemill.metastore.rows import GROUPS

    with open_stores(config) as opened:
        view = GroupView(opened)
        found = [view.summary(head) for head in opened.portal.call(opened.metastore.rows(GROUPS))]
    out.rows(found, empty="no groups")


@app.command("describe")
def describe(name: Name, config: ConfigOption = None, out: Output = TABLE) -> None:
    """Show one group: its members and, for each partition, the committed offset, the end offset, the lag and the member
    that owns it."""
    with open_stores(config) as opened:
        found = GroupView(opened).describe(name)
    if out.is_text:
        what = f"{found['protocol_type']} {found['protocol']}  generation={found['generation']}"
        print(f"{name}  {found['kind']}  {found['state']}  {what}{_format_configs(found['configs'])}")
        if found["members"]:
            names = ("member_id", "client_id", "host", "instance_id", "epoch")
            out.rows(found["members"], [Column(each.replace("_", " "), each) for each in names])
    shown = ("topic", "partition", "offset", "end", "lag", "member")
    out.rows(found["offsets"], [Column(each) for each in shown], value=found, empty="no committed offsets")


@app.command("alter")
def alter(
    name: Name,
    settings: Set = None,
    unset: Unset = None,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Set configs of one group, even before it has members. The group's coordinator applies them within a moment."""
    from tidemill.kafka.groups.configs import GROUP, GroupConfigCache
    from tidemill.kafka.groups.coordinator import is_group_name
    from tidemill.kafka.settings import KafkaSettings
    from tidemill.topics.config.alter import apply_changes

    changes = parse_config_changes(settings, unset)
    if not changes:
        raise InvalidError("nothing to change.", fix="Give --set or --unset.")
    if not is_group_name(name):
        raise InvalidError(f"bad group name: group={name!r}.")
    with open_stores(config) as opened:
        configs = GroupConfigCache(opened.catalogue, KafkaSettings(opened.config.kafka).group_limits)
        change = configs.change(name, lambda own: apply_changes(own, changes, GROUP, typed=True), validate_only=dry_run)
        found = {"group": name, "configs": opened.portal.call(change)}
    if dry_run:
        preview(out, found, f"the group after the change: {name}{_format_configs(found['configs'])}")
        return
    out.one(found, f"{name}{_format_configs(found['configs'])}")


def _format_configs(configs: object) -> str:
    """Return the configs as text, each preceded by two spaces."""
    assert isinstance(configs, dict)
    return "".join(f"  {key}={value}" for key, value in configs.items())


@app.command("reset")
def reset(
    name: Name,
    to: Annotated[str, typer.Option(help="New position: earliest, latest, or an offset.")] = "",
    by: Annotated[int, typer.Option(help="Move by this many records; a negative number moves back.")] = 0,
    topic: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:PARTITION; repeatable. Default: every partition with a committed offset."),
    ] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Move the committed offsets of a group. The group must have no members."""
    from tidemill.kafka.groups.offline_admin import OfflineGroupAdmin

    if bool(to) == bool(by) or (to not in ("", "earliest", "latest") and not to.isdecimal()):
        raise InvalidError(
            f"give exactly one of --to and --by: to={to!r} by={by}.", fix="Use --to earliest, latest or N, or --by N."
        )
    with open_stores(config) as opened:
        moves = GroupView(opened).plan_moves(name, to, by, topic or [])
        admin = OfflineGroupAdmin(opened.metastore, opened.clock, opened.rand)
        opened.portal.call(admin.check_unused(name))
        if not dry_run:
            confirm(f"Commit {len(moves)} other offsets for group {name}?", yes=yes, out=out)
            opened.portal.call(admin.reset(name, [row for _, _, row in moves]))
    rows: list[Row] = [
        {"topic": topic_name, "partition": row.partition, "before": before, "offset": row.offset}
        for topic_name, before, row in moves
    ]
    if dry_run and out.is_text:
        print("dry run: commit these offsets")
    elif dry_run:
        rows = [{**DRY_RUN, **row} for row in rows]
    out.rows(rows)


@app.command("delete")
def delete(
    name: Name,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Delete a group with all its committed offsets. The group must have no members."""
    from tidemill.kafka.groups.offline_admin import OfflineGroupAdmin
    from tidemill.kafka.transactions.store import drop_group_offsets

    with open_stores(config) as opened:
        admin = OfflineGroupAdmin(opened.metastore, opened.clock, opened.rand)
        opened.portal.call(admin.check_unused(name, exists=True))
        if dry_run:
            count = len(GroupView(opened).describe(name)["offsets"])
            preview(out, {"deleted": name, "offsets": count}, f"delete group {name} with {count} committed offsets")
            return
        confirm(f"Delete group {name} with its committed offsets?", yes=yes, out=out)
        forget = partial(drop_group_offsets, opened.consensus, opened.rand, name, None, opened.clock.now_ms())
        opened.portal.call(admin.delete(name, forget))
    out.one({"deleted": name}, f"deleted {name}")


def _member_fields(member: GroupMemberRow) -> Row:
    found: Row = {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "client_id": member.client_id,
        "host": member.client_host,
    }
    consumer = member.consumer
    if consumer is None:
        return found
    return {**found, "epoch": consumer.epoch, "topics": consumer.topics, "pattern": consumer.pattern or None}


class GroupView:
    """View of groups and the topics that they read. The parts are read one after another, not at one instant."""

    def __init__(self, opened: OpenStores) -> None:
        from tidemill.metastore.catalogue import TopicRow
        from tidemill.topics.partition_reader import LogPartitionReader

        self._opened = opened
        self._call = opened.portal.call
        self._topics: dict[str, TopicRow] = {row.topic_id: row for row in self._call(opened.catalogue.list(TopicRow))}
        self._by_name = {row.name: row for row in self._topics.values()}
        self._reader = LogPartitionReader(opened.consensus, opened.objects)

    def summary(self, head: GroupRow) -> Row:
        offsets = self._committed_offsets(head.group)
        return {
            "group": head.group,
            "kind": head.kind,
            "state": "Stable" if head.members else "Empty",
            "members": head.members,
            "partitions": len(offsets),
            "lag": sum(self._lag(row) for row in offsets),
        }

    def describe(self, name: str) -> Row:
        from tidemill.kafka.groups.subscriptions import CONSUMER, assigned_places
        from tidemill.metastore.rows import GROUP_MEMBERS, GROUP_PARTITIONS, GROUPS
        from tidemill.metastore.rows.groups import with_partitions

        metastore = self._opened.metastore
        head = self._call(metastore.get(GROUPS, name)) if name else None
        if head is None:
            raise MissingError(f"no such group: group={name}.", fix="List them with: tidemill group list")
        members = with_partitions(
            self._call(metastore.rows(GROUP_MEMBERS, name)), self._call(metastore.rows(GROUP_PARTITIONS, name))
        )
        holders: dict[tuple[str, int], str] = {}
        for member in members:
            if member.consumer is not None:
                held = [
                    (self._topics[topic], ps) for topic, ps in member.consumer.held.items() if topic in self._topics
                ]
                holders |= {(topic.name, partition): member.member_id for topic, ps in held for partition in ps}
            elif head.protocol_type == CONSUMER and member.assignment:
                holders |= dict.fromkeys(assigned_places(member.assignment), member.member_id)
        rows: list[Row] = []
        for row in self._committed_offsets(name):
            topic = self._topics[row.topic_id].name
            end = self._end_offset(row.topic_id, row.partition)
            rows.append(
                {
                    "topic": topic,
                    "partition": row.partition,
                    "offset": row.offset,
                    "end": end,
                    "lag": max(0, end - row.offset),
                    "metadata": row.metadata,
                    "committed_ms": row.commit_ms,
                    "member": holders.get((topic, row.partition), ""),
                }
            )
        return {
            **self.summary(head),
            "protocol_type": head.protocol_type,
            "protocol": head.protocol,
            "generation": head.generation,
            "configs": self._call(self._group_configs(name)),
            "members": [_member_fields(m) for m in members],
            "offsets": rows,
        }

    async def _group_configs(self, name: str) -> dict[str, str]:
        rows = await self._opened.catalogue.group_configs()
        return next((row.config for row in rows if row.group == name), {})

    def plan_moves(
        self, name: str, to: str, by: int, topics: list[str]
    ) -> list[tuple[str, int | None, GroupOffsetRow]]:
        """Return (topic, offset committed before, row to commit) for each selected partition."""
        from tidemill.metastore.rows.groups import GroupOffsetRow

        committed = {(row.topic_id, row.partition): row for row in self._committed_offsets(name)}
        places = [place for topic in topics for place in self._partitions_named(topic)] if topics else list(committed)
        if not places:
            raise MissingError(f"the group has no committed offsets: group={name}.", fix="Name topics with --topic.")
        moves: list[tuple[str, int | None, GroupOffsetRow]] = []
        for topic_id, partition in dict.fromkeys(places):
            before = committed.get((topic_id, partition))
            start = self._call(self._reader.log_start(topic_id, partition))
            end = self._end_offset(topic_id, partition)
            if by:
                wanted = (before.offset if before is not None else start) + by
            else:
                wanted = {"earliest": start, "latest": end}[to] if not to.isdecimal() else int(to)
            offset = min(max(wanted, start), end)
            row = GroupOffsetRow(name, topic_id, partition, offset, commit_ms=self._opened.clock.now_ms())
            moves.append((self._topics[topic_id].name, before.offset if before is not None else None, row))
        return moves

    def _partitions_named(self, topic: str) -> list[tuple[str, int]]:
        name, _, number = topic.partition(":")
        row = self._by_name.get(name)
        if row is None:
            raise MissingError(f"no such topic: topic={name}.", fix="List them with: tidemill topic list")
        if not number:
            return [(row.topic_id, partition) for partition in range(row.partitions)]
        if not number.isdecimal() or int(number) >= row.partitions:
            raise InvalidError(
                f"no such partition: topic={topic} partitions={row.partitions}.", fix="Use NAME:PARTITION."
            )
        return [(row.topic_id, int(number))]

    def _committed_offsets(self, group: str) -> list[GroupOffsetRow]:
        from tidemill.metastore.rows import GROUP_OFFSETS

        rows = self._call(self._opened.metastore.rows(GROUP_OFFSETS, group))
        return [row for row in rows if row.topic_id in self._topics]

    def _end_offset(self, topic_id: str, partition: int) -> int:
        return self._call(self._reader.high_watermark(topic_id, partition))

    def _lag(self, row: GroupOffsetRow) -> int:
        return max(0, self._end_offset(row.topic_id, row.partition) - row.offset)
