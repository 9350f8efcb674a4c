"""`tidemill restore`: bring a cluster back from its bucket alone, into empty consensus."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.config.config import load
from tidemill.base.errors import CorruptError, InvalidError, MissingError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.private_directories import is_present
from tidemill.base.status.logging import configure_logs
from tidemill.cli.context import DRY_RUN, EXIT_BAD_INPUT, ConfigOption, DryRunOption, ProgressBars
from tidemill.cli.output.data_lines import Row
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column

if TYPE_CHECKING:
    from tidemill.consensus.api import Consensus
    from tidemill.maintenance.restore.restore import Restorer
    from tidemill.objects.store import ObjectStore

From = Annotated[str, typer.Option("--from", help="Bucket URL to restore from. Default: objects.url.")]
To = Annotated[
    str, typer.Option("--consensus", help="URL of the empty consensus to restore into. Default: consensus.url.")
]
Manifest = Annotated[
    list[str] | None,
    typer.Option(
        "--manifest", help="Key of a manifest in the bucket, to use instead of its domain's newest. Repeatable."
    ),
]


def restore(
    source: From = "",
    consensus: To = "",
    manifest: Manifest = None,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Restore topics, bindings, tables and the catalogue from the bucket. Stop every node first.

    Exit 0 when every reference is intact, 1 when the restored cluster has broken references, 2 when refused.
    """
    from tidemill.consensus.factory import open_consensus
    from tidemill.consensus.memory import MemoryConsensus
    from tidemill.maintenance.restore.restore import Restorer
    from tidemill.objects.factory import local_directory, open_objects

    configure_logs("error")  # roles that this command holds briefly are not worth a log line
    loaded = load(config)
    clock, rand = SystemClock(), Rand()
    url, bucket = consensus or loaded.consensus_url, source or loaded.objects_url
    directory = local_directory(bucket)
    if directory is not None and not is_present(Path(directory)):
        raise MissingError(f"the bucket contains no cluster: path={directory} does not exist.", fix="Correct --from.")
    with BlockingPortal() as portal, ProgressBars() as bars:
        objects = portal.call(open_objects(bucket, clock, rand, create=False))
        target: Consensus
        try:
            target = portal.call(open_consensus(url, clock, rand, create=False))
        except MissingError:
            target = portal.call(open_consensus(url, clock, rand)) if not dry_run else MemoryConsensus(clock)
        try:
            restorer = Restorer(target, objects, clock, rand, bars.update)
            if dry_run:
                report = portal.call(_plan_restore(restorer, objects, clock, rand, manifest or []))
            else:
                report = portal.call(_run_restore(restorer, objects, clock, rand, manifest or []))
        except CorruptError as error:  # not EXIT_FAILED, which says that the cluster was restored
            print(f"tidemill: {error}", file=sys.stderr)
            raise SystemExit(EXIT_BAD_INPUT) from error
        finally:
            portal.call(target.aclose())
            portal.call(objects.aclose())
    if not out.is_text:
        mark = DRY_RUN if dry_run else {}
        out.rows([{**mark, **row} for row in _report_rows(report)], value=report)
    else:
        _print_report(report, out)
        if source and not dry_run and source != loaded.objects_url:
            print(
                "note    this configuration names another bucket: set objects.url to the bucket that was restored from"
            )
    raise SystemExit(1 if report.get("findings") else 0)


async def _plan_restore(
    restorer: Restorer, objects: ObjectStore, clock: Clock, rand: Rand, manifests: list[str]
) -> dict[str, Any]:
    from tidemill.maintenance.restore.plan import plan_restore
    from tidemill.metastore.backup.restore_source import find_source

    refused = ""
    try:
        source = await restorer.find_restore_source(manifests)
    except InvalidError as error:
        # The content of the bucket is worth showing even if this consensus cannot be restored into.
        source, refused = await find_source(objects, rand, manifests), str(error)
    return {**DRY_RUN, "refused": refused, **await plan_restore(objects, source, clock, rand)}


async def _run_restore(
    restorer: Restorer, objects: ObjectStore, clock: Clock, rand: Rand, manifests: list[str]
) -> dict[str, Any]:
    from tidemill.maintenance.restore.plan import plan_restore

    plan = await plan_restore(objects, await restorer.find_restore_source(manifests), clock, rand)
    done = await restorer.run(manifests)
    return {
        "dry_run": False,
        **plan,
        "restored": {
            "cluster": done.cluster.uuid,
            "restored_from": done.cluster.label,
            "incarnation": done.cluster.incarnation,
            "partitions": done.partitions,
            "bindings": done.bindings,
            "shards": done.shards,
            "captures_to_compare": done.captures_marked,
            "group_offsets_cut": done.group_offsets_cut,
        },
        "findings": [str(finding) for finding in done.findings.broken],
    }


def _report_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a cluster as rows: its metadata domains, topics and tables."""
    kinds = {"domain": report["domains"], "topic": report["topics"], "table": report["shards"]}
    found = [(kind, part) for kind, parts in kinds.items() for part in parts]
    return [{"kind": kind, "name": part.get("name", part.get("uuid")), **part} for kind, part in found]


def _format_contents(row: Row) -> str:
    if row["kind"] == "topic":
        return f"partitions {row['partitions']}, records {row['records']:,}, {row['size_bytes']:,} bytes"
    if row["kind"] == "table":
        return f"since {row['since']}, upper {row['upper']}, batches {row['batches']:,}"
    age = f"{row['age_ms'] / 1000:,.0f} s old" if row["age_ms"] is not None else "nothing persisted"
    return f"seqno {row['seqno']:,}, {age}, {row['manifest']}"


def _print_report(report: dict[str, Any], out: Output) -> None:
    cluster = report["cluster"]
    print(f"cluster {cluster['uuid']}  incarnation {cluster['incarnation']}  {cluster['manifest']}")
    out.rows(_report_rows(report), [Column("kind"), Column("name"), Column("contents", _format_contents)])
    for kind in ("captures", "pipelines", "groups"):
        if report[kind]:
            print(f"{kind}  {', '.join(report[kind])}")
    total = report["totals"]
    print("total   " + "  ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in total.items()))
    if report["checkpoint_age_ms"] is not None:
        print(f"topics and tables as of {report['checkpoint_age_ms'] / 1000:,.0f} s ago")
    if report["alive"] is not None:
        print(f"ALIVE   a node was seen {report['alive']['age_ms'] / 1000:,.0f} s ago: {report['alive']['node']}")
    if report.get("refused"):
        print(f"REFUSED {report['refused']}")
    if "restored" in report:
        done = report["restored"]
        print(f"restored as cluster {done['cluster']}, incarnation {done['incarnation']}; start it with: tidemill up")
    for finding in report.get("findings", ()):
        print(f"BROKEN  {finding}")
