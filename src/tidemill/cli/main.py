"""The `tidemill` command: one file per subcommand, imported only when needed.

Earlier names of commands and options remain as hidden aliases: the same behaviour, absent from --help.

Exit codes: 0 fresh, 1 lagging or a check failed, 2 stuck or bad input. An error is one sentence on stderr. With --json
the answer is the last line of stdout; logs go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from tidemill.base.errors import TidemillError
from tidemill.base.status.logging import configure_logs

if TYPE_CHECKING:
    app: typer.Typer


def build_application(only_sql: bool = False) -> typer.Typer:
    """Build the command tree. With `only_sql` it contains the one command `sql`, which runs often and must not import
    the others."""
    app = typer.Typer(
        name="tidemill",
        help="Stream every change from Postgres and Kafka, through one bucket, into exact keyed tables and live apps.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    if only_sql:
        from tidemill.cli import sql

        app.command("sql")(sql.sql)
        app.callback()(lambda: None)  # otherwise the only command would have no name
        return app
    from tidemill.cli import group, schema, shape, sql, table, txn
    from tidemill.cli.capture import commands as capture
    from tidemill.cli.cluster import doctor, restore, status, up, why
    from tidemill.cli.pipeline import commands as pipeline
    from tidemill.cli.pipeline import dead_letters
    from tidemill.cli.security import acl, user
    from tidemill.cli.topic import commands as topic
    from tidemill.cli.verify import command

    app.command("up")(up.up)
    app.command("status")(status.status)
    app.command("why")(why.why)
    app.command("verify")(command.verify)
    app.add_typer(capture.app, name="capture")
    app.add_typer(topic.app, name="topic")
    app.add_typer(group.app, name="group")
    app.add_typer(txn.app, name="txn")
    app.add_typer(user.app, name="user")
    app.add_typer(acl.app, name="acl")
    app.add_typer(schema.app, name="schema")
    app.add_typer(pipeline.app, name="pipeline")
    app.add_typer(shape.app, name="shape")
    app.add_typer(table.app, name="table")
    app.add_typer(table.app, name="shard", hidden=True)
    app.command("sql")(sql.sql)
    app.command("dead-letters")(dead_letters.dead_letters)
    app.command("dlq", hidden=True)(dead_letters.dead_letters)
    app.command("doctor")(doctor.doctor)
    app.command("restore")(restore.restore)
    return app


def __getattr__(name: str) -> Any:
    """Build `app` on the first access."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = build_application()
    return made


def run() -> None:
    """Run the command line of this process."""
    only_sql = sys.argv[1:2] == ["sql"]
    if only_sql:
        from tidemill.cli.sql import block_pandas

        block_pandas()
    run_application(lambda: build_application(only_sql)())


def run_application(application: Callable[[], object]) -> None:
    """Run a command line: every TidemillError becomes one sentence on stderr and exit code 2."""
    configure_logs()
    try:
        application()
    except TidemillError as error:
        print(f"tidemill: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
