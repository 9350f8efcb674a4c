"""`tidemill init`: inspect a database, and write the files of a cluster for it."""

from __future__ import annotations

import ast
import contextlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tidemill.base.config.config import Config, parse_text
from tidemill.base.config.environment import ENV_FILE
from tidemill.base.config.sections import NAME, NOT_A_NAME
from tidemill.base.errors import InvalidError, MissingError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.capture.postgres.connection import database_name, describe_dsn
from tidemill.capture.setup.inspection import Inspection, inspect_database
from tidemill.capture.setup.server_checks import SET_PARAMETER
from tidemill.cli.cluster.capture_checks import store_prior_identities
from tidemill.cli.cluster.ready_block import local_url
from tidemill.cli.context import EXIT_FAILED
from tidemill.cli.init.files import CONFIG_FILE, PAGE_DIRECTORY, PIPELINE_FILE, PRIVATE, file_texts
from tidemill.cli.init.plan import Plan, capture_name, make_plan
from tidemill.cli.output.output import TABLE, Output


def init(
    dsn: Annotated[
        str, typer.Option("--dsn", envvar="DATABASE_URL", help="The database, for example postgresql://me@host/shop.")
    ],
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Directory of the cluster.")] = Path(),
    name: Annotated[str, typer.Option("--name", help="Name of the capture. Default: the database's name.")] = "",
    tables: Annotated[
        list[str] | None,
        typer.Option("--tables", help="Tables to capture, with * and ?; repeatable. Default: all in schema public."),
    ] = None,
    out: Output = TABLE,
) -> None:
    """Write the files of a new cluster for a PostgreSQL database: configuration, pipeline, page.

    Prints the SQL that an administrator has to run before the database can be captured, and exits with 1 if there is
    any. A file that exists is kept; where tidemill.toml exists, nothing is written. The database is only read.
    """
    if os.path.lexists(directory / CONFIG_FILE):
        raise InvalidError(
            f"there is a cluster already, and nothing was written: path={directory / CONFIG_FILE}.",
            fix="Choose another directory: tidemill init DIR --dsn …",
        )
    capture = name or capture_name(database_name(dsn))
    if not NAME.match(capture):
        raise InvalidError(f"bad capture name: {NOT_A_NAME.format(capture)}.", fix="Correct --name.")
    with BlockingPortal() as portal:
        try:
            found = portal.call(inspect_database(capture, dsn, tables or ()))
        except MissingError as error:  # its remedy names the configuration, which does not exist yet
            fix = "Create a table, or choose others with --tables 'SCHEMA.*'; nothing was written."
            raise MissingError(error.message, fix=fix) from error
    if not found.tables:
        reasons = "; ".join(refusal.reason.rstrip(".") for refusal in found.refused.values())
        others = " ".join(f"--tables '{schema}.*'" for schema in found.other_schemas)
        fix = f"Correct one of them, or add {others}" if others else "Correct one of them."
        raise InvalidError(f"no table can be captured, and nothing was written: {reasons}.", fix=fix)
    plan = make_plan(capture, found)
    texts = file_texts(plan, dsn)
    _check_parses(texts[PIPELINE_FILE])
    config = parse_text(texts[CONFIG_FILE], directory / CONFIG_FILE, {**os.environ, plan.variable: dsn})
    existing = [path for path in texts if os.path.lexists(directory / path)]
    created = [path for path in texts if path not in existing]

    def store_identities() -> None:
        if found.replaced_identities:
            with BlockingPortal() as portal:
                portal.call(store_prior_identities(config, capture, found.replaced_identities))

    _write_files(directory, {path: texts[path] for path in created}, store_identities)
    if out.is_text:
        _print(directory, dsn, plan, found, created, existing, config)
    else:
        rows = [{"name": table.name, "source": table.source} for table in plan.tables]
        out.rows(rows, value=_to_value(plan, found, created, existing))
    if found.problems or found.statements:
        raise typer.Exit(EXIT_FAILED)


def _check_parses(pipeline: str) -> None:
    """Raise InvalidError if the text of the pipeline is not Python."""
    try:
        ast.parse(pipeline)
    except SyntaxError as error:
        raise InvalidError(
            "a name in the database has no form that Python accepts, and nothing was written:"
            f" reason={error.msg!r} line={(error.text or '').strip()!r}.",
            fix="Choose other tables with --tables, and report this line.",
        ) from error


def _write_files(directory: Path, texts: Mapping[str, str], before_last: Callable[[], None]) -> None:
    """Create files; the configuration last, because nothing is written where it exists. `before_last` runs before it.

    If anything fails, no file of `texts` is left. Raises InvalidError if a file cannot be created.
    """
    written: list[Path] = []
    try:
        for path in sorted(texts, key=lambda path: path == CONFIG_FILE):
            if path == CONFIG_FILE:
                before_last()
            _write(directory / path, texts[path], private=path in PRIVATE)
            written.append(directory / path)
    except BaseException:
        for file in written:
            with contextlib.suppress(OSError):
                file.unlink()
        raise


def _write(path: Path, text: str, *, private: bool) -> None:
    """Create a file. Raises InvalidError, also if another process was faster, and leaves no part of it then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
    except OSError as error:
        raise InvalidError(
            f"a file cannot be created, and nothing was written: path={path} reason={error.strerror}.",
            fix="Correct that, or choose another directory: tidemill init DIR --dsn …",
        ) from error


def next_commands(directory: Path, plan: Plan, config: Config) -> list[tuple[str, str]]:
    """Return the next five commands, each with a comment."""
    commands = [
        (f"cd {shlex.quote(str(directory))}", ""),
        ("tidemill doctor", "checks this machine and the database"),
        ("tidemill up", f"then open {local_url(config)}/{PAGE_DIRECTORY}/"),
        ("tidemill status", "in another terminal"),
        (f"tidemill sql 'SELECT * FROM {plan.count.name}'", "a table that Spark computes"),
        (f"tidemill why {plan.shown.name}", "how fresh a table is, and what blocks it"),
    ]
    return commands[:5] if directory != Path() else commands[1:]


def administrator_text(statements: Sequence[str]) -> str:
    """Return the statements for an administrator, one a line."""
    restart = any(statement.startswith(SET_PARAMETER) for statement in statements)
    head = f"An administrator has to run{', and then to restart PostgreSQL' if restart else ''}:"
    return "\n".join([head, *(f"  {statement};" for statement in statements)])


def _to_value(plan: Plan, found: Inspection, created: list[str], existing: list[str]) -> dict[str, object]:
    return {
        "capture": plan.capture,
        "tables": {table.name: table.source for table in plan.tables},
        "refused": {name: refusal.reason for name, refusal in found.refused.items()},
        "other_schemas": list(found.other_schemas),
        "problems": [{"problem": error.message, "fix": error.fix} for error in found.problems],
        "statements": list(found.statements),
        "created": created,
        "existing": existing,
    }


def _print(
    directory: Path, dsn: str, plan: Plan, found: Inspection, created: list[str], existing: list[str], config: Config
) -> None:
    version = f"{found.version // 10_000}.{found.version % 10_000}"
    print(f"PostgreSQL {version}  {describe_dsn(dsn)}")
    count = len(plan.tables)
    print(f"  {count} {'table' if count == 1 else 'tables'}: {', '.join(table.source for table in plan.tables)}")
    for refusal in found.refused.values():
        print(f"  not captured: {refusal.reason} {refusal.fix}")
    if plan.other_schemas:
        print(f"  not captured: schemas {', '.join(plan.other_schemas)}; {CONFIG_FILE} has the line that captures them")
    for error in found.problems:
        print(f"  {error}")
    if found.statements:
        print(administrator_text(found.statements))
    print(f"created in {directory}: {', '.join(created) or 'nothing'}")
    for path in existing:
        note = f"; add {plan.variable} to it" if path == ENV_FILE else ""
        print(f"  kept, because it exists: {path}{note}")
    commands = next_commands(directory, plan, config)
    width = max(len(command) for command, _ in commands)
    print("next:")
    for command, note in commands:
        print(f"  {command:{width}}  # {note}" if note else f"  {command}")
