"""`tidemill topic lost`: missing objects that hold records of a topic, and how to continue without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.base.errors import InvalidError, MissingError
from tidemill.cli.context import ConfigOption, DryRunOption, OpenStores, YesOption, confirm, either_name, open_stores
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column

if TYPE_CHECKING:
    from tidemill.topics.lost_objects import LostRange
    from tidemill.topics.partition.state_machine.state import PartitionState

AcceptLoss = Annotated[
    list[str] | None, typer.Option("--accept-loss", help="Abandon a lost object for good, or `all`. Repeatable.")
]
LetGo = Annotated[list[str] | None, typer.Option("--let-go", hidden=True)]
"""Earlier name of --accept-loss."""


def lost(
    name: Annotated[str, typer.Argument(help="Topic name.")],
    accept_loss: AcceptLoss = None,
    let_go: LetGo = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """List objects that hold fresh records of a topic and are missing from the bucket.

    Readers wait for them, and later records do not move into L1. An object that is abandoned with --accept-loss
    counts as empty, for every topic that has records in it: their offsets become a gap, as after compaction. This
    cannot be undone, so it is asked unless --yes is given.
    """
    from tidemill.topics.lost_objects import drop_lost_object

    abandoned = either_name(accept_loss, let_go, "--accept-loss", "--let-go")
    with open_stores(config) as opened:
        found = _find_lost_ranges(opened, name)
        keys = _objects_to_abandon(found, abandoned or [])
        if keys and not dry_run:
            objects = f"{len(keys)} lost object{'' if len(keys) == 1 else 's'}"
            question = f"Abandon {objects} for good? Their records, also those of other topics, become gaps of offsets."
            confirm(question, yes=yes, out=out)
            for key in keys:
                opened.portal.call(drop_lost_object(opened.objects, key))
        if keys:
            found = found if dry_run else _find_lost_ranges(opened, name)
    rows = [
        {
            "topic": name, "partition": each.partition, "object": each.object_key, "offset": each.start,
            "end": each.end, "batches": each.batches, "let_go": each.let_go,
        }
        for each in found
    ]  # fmt: skip
    if dry_run:
        rows = [row | {"dry_run": True, "let_go": row["let_go"] or row["object"] in keys} for row in rows]
        if out.is_text:
            print(f"dry run: abandon {len(keys)} objects")
    columns = [
        *(Column(each) for each in ("topic", "partition", "offset", "end", "batches")),
        Column("state", lambda row: "abandoned" if row["let_go"] else "lost"),
        Column("object"),
    ]
    out.rows(rows, columns, empty=f"nothing of {name} is lost")


def _find_lost_ranges(opened: OpenStores, name: str) -> list[LostRange]:
    from tidemill.metastore.catalogue import TopicRow
    from tidemill.topics.lost_objects import lost_ranges
    from tidemill.topics.partition.recovery import catch_up, partition_log
    from tidemill.topics.partition.state_machine.state import PartitionState

    async def states(row: TopicRow) -> list[tuple[int, PartitionState]]:
        logs = [partition_log(row.topic_id, partition) for partition in range(row.partitions)]
        return [
            (index, (await catch_up(opened.consensus, opened.objects, log, PartitionState()))[0])
            for index, log in enumerate(logs)
        ]

    row = opened.portal.call(opened.catalogue.get(TopicRow, name))
    if row is None:
        raise MissingError(f"no such topic: topic={name}.", fix="List them with: tidemill topic list")
    return opened.portal.call(lost_ranges(opened.objects, opened.portal.call(states(row))))


def _objects_to_abandon(found: list[LostRange], keys: list[str]) -> list[str]:
    """Return the lost objects that `keys` name. Raises InvalidError for an object that is not lost."""
    lost = {each.object_key for each in found if not each.let_go}
    strange = sorted(set(keys) - lost - {"all"} - {each.object_key for each in found})
    if strange:
        raise InvalidError(
            f"the object is not lost: object={strange[0]}.", fix="Name an object that is listed, or all."
        )
    return sorted(lost if "all" in keys else lost & set(keys))
