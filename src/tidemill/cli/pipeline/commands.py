"""`tidemill pipeline`: run pipelines without a node, list and describe them, restart their drivers, delete them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.base.config.config import Config, load
from tidemill.base.config.sections import PipelineSection
from tidemill.base.errors import InvalidError, MissingError
from tidemill.base.status.drivers import is_silent
from tidemill.cli.context import (
    ConfigOption,
    JsonOption,
    YesOption,
    confirm,
    open_stores,
    print_json,
    with_option_groups,
)
from tidemill.cli.pipeline.check import check
from tidemill.cli.pipeline.restart import Name, restart
from tidemill.cli.pipeline.view import (
    format_derived_table,
    format_instance,
    format_lag,
    format_table,
    read_driver_reports,
    read_pipeline_views,
)
from tidemill.cli.run_supervised import InstancesOption, SparkOptions, run_supervised
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import PipelineRow
from tidemill.node.supervise.processes import start_drivers

app = typer.Typer(help="Check, run, list, describe, restart and delete pipelines.", no_args_is_help=True)


@app.command("run")
@with_option_groups
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
def list_all(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the pipelines: running drivers, tables, the lag of the slowest table, and dead letters."""
    with open_stores(config) as opened:
        views = read_pipeline_views(opened)
    if as_json:
        print_json([view.summary() for view in views.values()])
        return
    for view in views.values():
        row = view.summary()
        print(
            f"{row['pipeline']}  {row['running']} running  {row['silent']} silent"
            + (f"  {row['parked']} parked" if row["parked"] else "")
            + f"  tables={len(view.tables)}"
            f"  lag={format_lag(row['lag_ms'])}  dead_letters={row['dead_letters']}  {row['file']}".rstrip()
        )


@app.command("describe")
def describe(name: Name, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show one pipeline: its tables, dead letters, failing parts and drivers.

    For each table: input, upper, lag in time, rows and the number of drivers that work on it. For a derived table also
    how it is maintained, and why.
    """
    with open_stores(config) as opened:
        views = read_pipeline_views(opened)
    if name not in views:
        raise MissingError(f"no such pipeline: pipeline={name}.", fix="See `tidemill pipeline list`.")
    view = views[name]
    if as_json:
        print_json(view.summary() | {"tables": view.tables, "failing": view.failing, "instances": view.instances})
        return
    row = view.summary()
    print(f"{name}  {row['file']}".rstrip())
    print(f"  dead letters {row['dead_letters']}" + (f" in {view.letters}" if view.letters else ""))
    print("  tables")
    for table in view.tables:
        print(f"    {format_table(table)}")
        if "inputs" in table:
            print(f"      {format_derived_table(table)}")
    for part in view.failing:
        print(f"  {part['mark']}  {part['state']}: {part['reason']}")
    print("  drivers" if view.instances else "  no driver is reporting")
    for instance in view.instances:
        print(f"    {format_instance(instance)}")


app.command("check")(check)
app.command("restart")(restart)


@app.command("delete")
def delete(name: Name, yes: YesOption = False, config: ConfigOption = None, as_json: JsonOption = False) -> None:
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
        confirm(f"Forget pipeline {name}? Its tables are kept.", yes=yes, as_json=as_json)
        opened.portal.call(opened.catalogue.delete(PipelineRow, name))
        board = StatusBoard(opened.consensus, opened.rand)
        for report in reports:
            opened.portal.call(board.drop_report(report.process))
    if as_json:
        print_json({"deleted": name})
    else:
        print(f"deleted {name}; its tables are kept")


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
