"""`tidemill pipeline`: run pipelines without a node, list and describe them, restart their drivers, delete them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.base.config.config import Config, load
from tidemill.base.config.sections import PipelineSection
from tidemill.base.errors import InvalidError, MissingError
from tidemill.base.status.drivers import is_silent
from tidemill.cli.context import ConfigOption, DryRunOption, YesOption, confirm, open_stores, preview
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column
from tidemill.cli.pipeline.check import check
from tidemill.cli.pipeline.restart import Name, restart
from tidemill.cli.pipeline.view import (
    DRIVER_COLUMNS,
    TABLE_COLUMNS,
    format_derived_table,
    format_lag,
    read_driver_reports,
    read_pipeline_views,
)
from tidemill.cli.run_supervised import InstancesOption, SparkOptions, run_supervised
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import PipelineRow
from tidemill.node.supervise.processes import start_drivers

app = typer.Typer(help="Check, run, list, describe, restart and delete pipelines.", no_args_is_help=True)


@app.command("run")
def run(
    name: Name,
    file: Annotated[
        Path | None, typer.Option("--file", help="Its Python file, if tidemill.toml does not define it.")
    ] = None,
    instances: InstancesOption = None,
    label: Annotated[
        str,
        typer.Option(
            "--label", help="Distinguishes these drivers from those of other machines: a-z, 0-9 and _, with a letter."
        ),
    ] = "",
    *,
    spark: SparkOptions,
    config: ConfigOption = None,
) -> None:
    """Run the drivers of one pipeline, supervised, until Ctrl-C. No node is needed on this machine.

    Any number of identical drivers may run: one of them wins each step, and the others adopt its result.
    """
    loaded = _with_pipeline_file(load(config), name, file)
    if instances is None:
        instances = max(1, loaded.pipeline[name].spark.instances)
    loaded = spark.apply(loaded, [name], instances)
    if label and not (label.isascii() and label.replace("_", "a").isalnum() and label.islower()):
        raise InvalidError(f"bad option: --label {label!r}.", fix="Use a-z, 0-9 and _, with at least one letter.")
    teller = "-".join(part for part in ("pipeline", name, label) if part)
    run_supervised(
        loaded,
        teller,
        lambda supervisor, _: start_drivers(loaded, [name], supervisor, label),
        pipelines=[name],
        label=label,
    )


@app.command("list")
def list_all(config: ConfigOption = None, out: Output = TABLE) -> None:
    """List the pipelines: running drivers, tables, the lag of the slowest table, and dead letters."""
    with open_stores(config) as opened:
        views = read_pipeline_views(opened)
    columns = [
        *(Column(name) for name in ("pipeline", "running", "silent", "parked")),
        Column("tables", lambda row: len(row["tables"])),
        Column("lag", lambda row: format_lag(row["lag_ms"]), right=True),
        Column("dead letters", "dead_letters"),
        Column("file"),
    ]
    out.rows([view.summary() for view in views.values()], columns, empty="no pipelines")


@app.command("describe")
def describe(name: Name, config: ConfigOption = None, out: Output = TABLE) -> None:
    """Show one pipeline: its tables, dead letters, failing parts and drivers.

    For each table: input, upper, lag in time, rows, updates and the number of drivers that work on it. For a derived
    table also how it is maintained, and why.
    """
    with open_stores(config) as opened:
        views = read_pipeline_views(opened, counted=name)
    if name not in views:
        raise MissingError(f"no such pipeline: pipeline={name}.", fix="See `tidemill pipeline list`.")
    view = views[name]
    row = view.summary()
    answer = row | {"tables": view.tables, "failing": view.failing, "instances": view.instances}
    if out.is_text:
        print(f"{name}  {row['file']}".rstrip())
        print(f"dead letters: {row['dead_letters']}" + (f" in {view.letters}" if view.letters else ""))
    out.rows(view.tables, TABLE_COLUMNS, value=answer, empty="no tables")
    if out.is_text:
        for table in view.tables:
            if "inputs" in table:
                print(f"{table['table']} is maintained {format_derived_table(table)}")
            if late := table.get("sequence"):
                print(
                    f"{table['table']}: {late['late']:,} records were late, and {late['revived']:,} later than their"
                    " key's tombstone lasts, since its drivers started"
                )
            for expectation, count in table.get("violations", {}).items():
                print(f"{table['table']}: {count:,} records violate {expectation}, since its drivers started")
        for part in view.failing:
            print(f"{part['mark']} is {part['state']}: {part['reason']}")
        out.rows(view.instances, DRIVER_COLUMNS, empty="no driver is reporting")


app.command("check")(check)
app.command("restart")(restart)


@app.command("delete")
def delete(
    name: Name,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Forget a pipeline that does not run. Its tables are kept until `table drop`.

    Bindings and records are no longer retained for it, and its silent drivers disappear from `status`. A running
    pipeline is refused. If the pipeline is started later, input that it had not read may be gone.
    """
    with open_stores(config) as opened:
        reports = read_driver_reports(opened, name)
        for report in reports:
            if not is_silent(report, opened.clock.now_ms()):
                raise InvalidError(
                    f"the pipeline runs: pipeline={name} process={report.process} pid={report.pid} host={report.host}.",
                    fix="Stop it, and remove it from the configuration.",
                )
        if opened.portal.call(opened.catalogue.get(PipelineRow, name)) is None:
            raise MissingError(f"no such pipeline: name={name}.", fix="See `tidemill pipeline list`.")
        if dry_run:
            silent = [report.process for report in reports]
            drivers = f", and {len(silent)} silent drivers" if silent else ""
            preview(out, {"deleted": name, "silent": silent}, f"forget pipeline {name}{drivers}; its tables are kept")
            return
        confirm(f"Forget pipeline {name}? Its tables are kept.", yes=yes, out=out)
        opened.portal.call(opened.catalogue.delete(PipelineRow, name))
        board = StatusBoard(opened.consensus, opened.rand)
        for report in reports:
            opened.portal.call(board.drop_report(report.process))
    out.one({"deleted": name}, f"deleted {name}; its tables are kept")


def _with_pipeline_file(config: Config, name: str, file: Path | None) -> Config:
    if file is not None:
        section = config.pipeline.get(name)
        update = {"file": str(file.absolute())}
        found = section.model_copy(update=update) if section is not None else PipelineSection.model_validate(update)
        return config.model_copy(update={"pipeline": config.pipeline | {name: found}})
    if name not in config.pipeline:
        known = ", ".join(sorted(config.pipeline)) or "none"
        raise MissingError(
            f"no such pipeline in the configuration: pipeline={name}.", fix=f"Known: {known}; or give --file."
        )
    return config
