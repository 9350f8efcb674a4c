"""The `tidemill` command: one file per subcommand, imported only when it runs or shows its own help.

    tidemill [-c FILE] [-o FORMAT] NAME …
      │  COMMANDS: name → summary, panel of --help, module     `tidemill --help` and shell completion need no more
      └─ resolve_command: import the module of NAME, and give it the options that stood before its name

Earlier names of commands and options remain as hidden aliases: the same behaviour, absent from --help.

Exit codes: see `cli.context`. An error is one sentence on stderr. The answer is on stdout, in the format of `-o`; logs
go to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from tidemill.base.errors import TidemillError
from tidemill.base.libraries import hide_modules, missing_extra
from tidemill.cli.context import (
    EXIT_BAD_INPUT,
    EXIT_GOOD,
    EXIT_INTERRUPTED,
    ConfigOption,
    exit_code_of,
    with_option_groups,
)
from tidemill.cli.examples import add_examples
from tidemill.cli.output.output import Form, FormOption, JsonOption, Output, flush_output

RUN, WATCH, TABLES, SOURCES, CLIENTS = "Run", "Watch", "Tables", "Sources", "Kafka clients and users"


class Entry(NamedTuple):
    """A command of the first level. `summary` is the first sentence of its help."""

    panel: str
    summary: str
    module: str
    attribute: str
    hidden: bool = False


COMMANDS = {
    "init": Entry(
        RUN,
        "Write the files of a new cluster for a PostgreSQL database: configuration, pipeline, page.",
        "init.command",
        "init",
    ),
    "up": Entry(RUN, "Run a node (Kafka, HTTP, capture) and the drivers of its pipelines.", "cluster.up", "up"),
    "pipeline": Entry(RUN, "Check, run, list, describe, restart and delete pipelines.", "pipeline.commands", "app"),
    "restore": Entry(
        RUN, "Restore topics, bindings, tables and the catalogue from the bucket.", "cluster.restore", "restore"
    ),
    "status": Entry(
        WATCH,
        "Show each source and table: its state, its delay, and what blocks it.",
        "cluster.status",
        "status",
    ),
    "why": Entry(WATCH, "Show how fresh a table is and what blocks it.", "cluster.why", "why"),
    "logs": Entry(WATCH, "Show the logs of the node and of the drivers on this machine.", "cluster.logs", "logs"),
    "doctor": Entry(
        WATCH,
        "Check Python, Java, bash, disk, ports, bucket, consensus, Postgres and pipelines.",
        "cluster.doctor",
        "doctor",
    ),
    "version": Entry(
        WATCH, "Show the versions of tidemill, Python, Spark and the stored formats.", "version", "version"
    ),
    "table": Entry(TABLES, "List, describe, compact, evolve, export and drop tables.", "table", "app"),
    "shard": Entry(TABLES, "List, describe, compact, evolve, export and drop tables.", "table", "app", hidden=True),
    "sql": Entry(TABLES, "Run a SQL query over tables at one time, which is printed with the result.", "sql", "sql"),
    "verify": Entry(
        TABLES,
        "Compare tables with their sources: missing, extra and different rows, and a hash.",
        "verify.command",
        "verify",
    ),
    "lake": Entry(TABLES, "List, describe and publish Iceberg tables.", "lake", "app"),
    "shape": Entry(TABLES, "List and fetch shapes, and sign shape URLs.", "shape", "app"),
    "capture": Entry(
        SOURCES,
        "List captured tables, copy one again, accept changed columns, or drop a capture.",
        "capture.commands",
        "app",
    ),
    "topic": Entry(SOURCES, "Manage topics: partitions, configs and records.", "topic.commands", "app"),
    "schema": Entry(SOURCES, "List, show, register, delete and check schemas.", "schema", "app"),
    "dead-letters": Entry(
        SOURCES,
        "List and replay dead letters: records and rows that a pipeline could not decode or hold.",
        "pipeline.dead_letters",
        "app",
    ),
    "dlq": Entry(
        SOURCES,
        "List and replay dead letters: records and rows that a pipeline could not decode or hold.",
        "pipeline.dead_letters",
        "app",
        hidden=True,
    ),
    "group": Entry(CLIENTS, "List, describe, alter, reset and delete consumer groups.", "group", "app"),
    "txn": Entry(CLIENTS, "List the transactions of Kafka producers, or abort one.", "txn", "app"),
    "user": Entry(CLIENTS, "Add, list and delete users of the Kafka endpoint.", "security.user", "app"),
    "acl": Entry(CLIENTS, "Add, list and delete access control rules (Kafka ACLs).", "security.acl", "app"),
}


DEFAULT_COMMANDS = {"dead-letters": "list", "dlq": "list"}
"""Group → its command that runs if none is named."""


class OutputClosedError(Exception):
    """The reader of the output, such as `head`, has ended."""


class LazyGroup(TyperGroup):
    """The commands of `COMMANDS`. Help and completion use their entries; `resolve_command` imports one of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=entry.summary, hidden=entry.hidden, rich_help_panel=entry.panel)
            for name, entry in COMMANDS.items()
        }

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        command = load_command(str(name))
        if "--help" not in rest:
            from tidemill.base.status.logging import configure_logs  # imports rich: not for help

            configure_logs()
        return name, command, with_global_options(command, rest, ctx.params)

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                flush_output()
        except BrokenPipeError as error:  # Typer would exit with 1
            raise OutputClosedError from error


def load_command(name: str) -> Any:
    """Import the command of an entry of `COMMANDS`."""
    entry = COMMANDS[name]
    found = getattr(import_module(f"tidemill.cli.{entry.module}"), entry.attribute)
    command: Any
    if isinstance(found, typer.Typer):
        for registered in found.registered_commands:
            if registered.callback is not None:
                registered.callback = with_option_groups(registered.callback)
        command = typer.main.get_group(found)
    else:
        single = typer.Typer(add_completion=False)
        single.command(name)(with_option_groups(found))
        command = typer.main.get_command(single)
    command.name = name
    add_examples(name, command)
    return command


def with_global_options(command: Any, args: list[str], given: Mapping[str, Any]) -> list[str]:
    """Return `args` with the options that stood before the command, where the command has them.

    They come first, so that the same option after the command overrides them.
    """
    default = DEFAULT_COMMANDS.get(command.name)
    if default is not None and (not args or args[0] not in (*command.commands, "--help")):
        args = [default, *args]
    path = 0
    while isinstance(command, TyperGroup) and args[path:] and args[path] in command.commands:
        command = command.commands[args[path]]
        path += 1
    known = {param.name for param in command.params}
    options = ["--config", str(given["config"])] if given.get("config") and "config" in known else []
    form = Output(given.get("output", Form.TABLE), bool(given.get("as_json"))).form
    if form is not Form.TABLE and "output" in known and "--json" not in args:
        options += ["--output", str(form)]
    return [*args[:path], *options, *args[path:]]


def _print_version(asked: bool) -> None:
    if asked:
        from tidemill import __version__

        print(f"tidemill {__version__}")
        raise typer.Exit()


def build_application() -> typer.Typer:
    app = typer.Typer(
        name="tidemill", cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False,
        epilog="Exit codes: 0 good, 1 a check failed or data lags, 2 bad input or no cluster, 3 stuck, 4 unavailable.",
    )  # fmt: skip

    @app.callback()
    def tidemill(
        config: ConfigOption = None,
        output: FormOption = Form.TABLE,
        as_json: JsonOption = False,
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """Stream every change from Postgres and Kafka, through one bucket, into exact keyed tables and live apps."""

    return app


app = build_application()


HIDDEN = {"sql": ("pandas",), "group": ("hypothesis",), "txn": ("hypothesis",)}
"""Modules that only slow a command down. Commands that run a user's pipeline file hide none."""


def run() -> None:
    """Run the command line of this process."""
    if sys.stdout is None:  # closed by the shell: >&-
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the life of the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale without UTF-8 cannot show every name
    hide_modules(*HIDDEN.get("".join(sys.argv[1:2]), ()))
    run_application(lambda: app(prog_name="tidemill"))


def run_application(application: Callable[[], object]) -> None:
    """Run a command line: every TidemillError becomes one sentence on stderr and an exit code."""
    try:
        application()
    except TidemillError as error:
        print(f"tidemill: {error}", file=sys.stderr)
        raise SystemExit(exit_code_of(error)) from None
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        print(f"tidemill: {missing}", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except OutputClosedError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_GOOD) from None
