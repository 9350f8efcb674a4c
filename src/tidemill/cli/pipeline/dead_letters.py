"""`tidemill dead-letters`: the dead letters of a pipeline, each with its reason, position and bytes; replay them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.cli.context import DRY_RUN, ConfigOption, DryRunOption, OpenStores, open_stores
from tidemill.cli.output.output import TABLE, Output
from tidemill.console.dead_letter_read import LettersRead, read_letters
from tidemill.console.views.dead_letters import newest_letters
from tidemill.metastore.catalogue import PipelineRow

if TYPE_CHECKING:
    from tidemill.spark.replay.table_replay import Outcome


app = typer.Typer(
    help="List and replay dead letters: records and rows that a pipeline could not decode or hold.",
    no_args_is_help=False,
)
OUTCOMES = ("applied", "superseded", "invalid", "waiting", "unknown")


@app.command("list")
def dead_letters(
    pipeline: Annotated[str, typer.Argument(help="Pipeline name. Default: all pipelines.")] = "",
    limit: Annotated[int, typer.Option(help="How many of the newest records to show.", min=1)] = 20,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """List dead letters: records and rows that a pipeline could not decode or hold.

    The pipeline skipped them, and continued.
    """
    with open_stores(config) as opened:
        rows = [r for r in opened.portal.call(opened.catalogue.list(PipelineRow)) if pipeline in ("", r.name)]
        if pipeline and not rows:
            if pipeline in opened.config.pipeline:
                raise MissingError(f"the pipeline has not run yet: pipeline={pipeline}.", fix="Start it: tidemill up.")
            raise MissingError(f"no such pipeline: pipeline={pipeline}.", fix="See `tidemill pipeline list`.")
        found = [_read_letters(opened, row.dead_letters, limit) for row in rows if row.dead_letters]
    total, expired = sum(each.total for each in found), sum(each.expired or 0 for each in found)
    newest = newest_letters((letter for each in found for letter in each.letters), limit)
    letters = [letter | {"bytes": (letter["bytes"] or b"").decode("utf-8", "backslashreplace")} for letter in newest]
    if out.is_text:
        print(f"{total} dead letter{'' if total == 1 else 's'}" + (f", {expired:,} expired" if expired else ""))
    if letters or not out.is_text:
        out.rows(letters, value={"total": total, "expired": expired, "records": letters})


def _read_letters(opened: OpenStores, name: str, limit: int) -> LettersRead:
    try:
        return opened.portal.call(read_letters(opened.shard(name), limit))
    except MissingError:
        return LettersRead(0, [], 0, [])  # the driver has not run yet


@app.command("replay")
def replay(
    pipeline: Annotated[str, typer.Argument(help="Pipeline name.")],
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Read the records of dead letters again, with the pipeline's present file, after the cause was repaired.

    A record is applied unless its key has a newer one. Letters that are done are removed; the others stay, with their
    reason. Repeating the command, also after it was killed, changes nothing that is done. Exit 1 if letters stay.
    """
    with open_stores(config) as opened:
        section = opened.config.pipeline.get(pipeline)
        if section is None:
            raise InvalidError(
                f"the configuration has no such pipeline: key=pipeline.{pipeline}.",
                fix="Add the pipeline with its file.",
            )
        outcomes = _replay(opened, pipeline, Path(section.file), dry_run)
    rows = [_outcome_row(outcome) for outcome in outcomes]
    counts = Counter(row["outcome"] for row in rows)
    found = {name: counts[name] for name in OUTCOMES}
    if out.is_text:
        said = ", ".join(f"{count:,} {name}" for name, count in found.items() if count) or "no dead letters"
        print(f"dry run: {said}" if dry_run else said)
    if rows or not out.is_text:
        marked = [{**DRY_RUN, **row} for row in rows] if dry_run and not out.is_text else rows
        out.rows(marked, value={"dry_run": dry_run, **found, "records": rows})
    if counts["invalid"] or counts["waiting"] or counts["unknown"]:
        raise typer.Exit(1)


def _replay(opened: OpenStores, name: str, file: Path, dry_run: bool) -> list[Outcome]:
    from tidemill.spark.definition import load_pipeline
    from tidemill.spark.replay.pipeline_replay import replay_pipeline
    from tidemill.spark.settings import StoreUrls
    from tidemill.spark.stores import open_stores as open_spark_stores

    declared, settings = load_pipeline(file, name), opened.config
    urls = StoreUrls(settings.objects_url, settings.consensus_url)
    stores = opened.portal.call(open_spark_stores(urls, domains=settings.metastore.domains, create=False))
    found: list[Outcome] = []
    try:
        for some in replay_pipeline(opened.portal, stores, declared, dry=dry_run):
            found += some
    except TidemillError as error:
        if found:
            done = Counter(outcome.outcome for outcome in found)
            said = ", ".join(f"{outcome}={count}" for outcome, count in sorted(done.items()))
            raise type(error)(f"{error.message} Before that: {said}.", fix=error.fix) from error
        raise
    finally:
        opened.portal.call(stores.aclose())
    return found


def _outcome_row(outcome: Outcome) -> dict[str, Any]:
    topic, partition, offset = outcome.place
    return {
        "table": outcome.table,
        "topic": topic,
        "partition": partition,
        "offset": offset,
        "outcome": outcome.outcome,
        "reason": outcome.reason,
    }
