"""`tidemill user`: users that authenticate by PLAIN or SCRAM. A password is read from a terminal or a pipe, never from
an argument."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tidemill.base.config.config import load
from tidemill.base.errors import InvalidError, MissingError
from tidemill.cli.context import ConfigOption, DryRunOption, YesOption, confirm, open_stores, preview
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column

app = typer.Typer(help="Add, list and delete users of the Kafka endpoint.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="User name; as a principal it is User:NAME.")]
Iterations = Annotated[int, typer.Option(help="Iterations of the password hash.")]
DEFAULT_ITERATIONS = 4_096
LINE_CHARS_MAX = 1_025


@app.command("add")
def add(
    name: Name, iterations: Iterations = DEFAULT_ITERATIONS, config: ConfigOption = None, out: Output = TABLE
) -> None:
    """Add a user, or change the password of one. The password is asked for on a terminal, or read from the first line
    of stdin."""
    from tidemill.security.scram import NAMES, SALT_BYTES, derive_credential
    from tidemill.security.users import Users, check_iterations, check_user

    check_user(name)
    check_iterations(iterations)
    load(config)  # a wrong configuration is reported before the question
    password = _read_password(name)
    with open_stores(config, create=True) as opened:
        users = Users(opened.metastore, opened.clock)
        for mechanism in NAMES:
            salt = bytes.fromhex(opened.rand.nonce() + opened.rand.nonce())[:SALT_BYTES]
            opened.portal.call(users.put(derive_credential(name, mechanism, password, salt, iterations)))
    mechanisms = list(NAMES.values())
    row = {"user": name, "mechanisms": mechanisms, "iterations": iterations}
    out.one(row, f"added {name}  {', '.join(mechanisms)}")


@app.command("list")
def list_users(config: ConfigOption = None, out: Output = TABLE) -> None:
    """List the users and the mechanisms for which each has a credential."""
    from tidemill.security.scram import NAMES, Credential
    from tidemill.security.users import Users

    found: dict[str, list[Credential]] = {}
    with open_stores(config) as opened:
        for credential in opened.portal.call(Users(opened.metastore, opened.clock).list()):
            found.setdefault(credential.user, []).append(credential)
    rows = [
        {"user": name, "mechanisms": {NAMES[each.mechanism]: each.iterations for each in credentials}}
        for name, credentials in found.items()
    ]
    out.rows(rows, [Column("user"), Column("mechanisms", lambda row: list(row["mechanisms"]))], empty="no users")


@app.command("delete")
def delete(
    name: Name,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Delete a user. Open connections stay until their session ends."""
    from tidemill.security.scram import NAMES
    from tidemill.security.users import Users

    with open_stores(config) as opened:
        users = Users(opened.metastore, opened.clock)
        have = [each.mechanism for each in opened.portal.call(users.list()) if each.user == name]
        if not have:
            raise MissingError(f"no such user: user={name}.", fix="List them with: tidemill user list")
        if dry_run:
            preview(out, {"deleted": name}, f"delete user {name}")
            return
        confirm(f"Delete user {name}?", yes=yes, out=out)
        opened.portal.call(users.delete(name, list(NAMES)))
    out.one({"deleted": name}, f"deleted {name}")


def _read_password(name: str) -> str:
    """Return the password that the user typed or piped. Raises InvalidError for an empty or too long one."""
    if sys.stdin.isatty():
        password = str(typer.prompt(f"Password of {name}", hide_input=True, confirmation_prompt=True))
    else:
        password = sys.stdin.readline(LINE_CHARS_MAX + 1).rstrip("\r\n")
    if not 0 < len(password) < LINE_CHARS_MAX:
        raise InvalidError(
            "the password is empty or too long.", fix=f"Type or pipe 1 to {LINE_CHARS_MAX - 1} characters."
        )
    return password
