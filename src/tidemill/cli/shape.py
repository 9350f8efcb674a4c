"""`tidemill shape`: list the live shapes of a node, and fetch one over HTTP as any client would."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import typer

from tidemill.base.config import Config, load
from tidemill.base.errors import Invalid, Missing, Unavailable
from tidemill.cli.context import ConfigOption, JsonOption, print_json

TOKEN = "TIDEMILL_TOKEN"
"""The environment variable with a bearer token for nodes that ask for one."""

app = typer.Typer(help="List and fetch shapes.", no_args_is_help=True)


@app.command("list")
def list_shapes(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the shapes that the node serves now."""
    shapes = json.loads(_get(config, "/api/shapes", {})[1])
    if as_json:
        print_json(shapes)
        return
    for shape in shapes:
        print("  ".join(f"{key}={value}" for key, value in shape.items()))


@app.command("get")
def get(
    table: Annotated[str, typer.Argument(help="schema.table of a captured database, or shard.NAME.")],
    where: Annotated[str, typer.Option(help="Filter, in PostgreSQL's own grammar.")] = "",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the current rows of a shape."""
    parameters = {"table": table, "offset": "-1", **({"where": where} if where else {})}
    rows: dict[str, Any] = {}
    while True:
        headers, body = _get(config, "/v1/shape", parameters)
        for item in json.loads(body):
            operation = item["headers"].get("operation")
            if operation in ("insert", "update"):
                rows[item["key"]] = {**rows.get(item["key"], {}), **item["value"]}
            elif operation == "delete":
                rows.pop(item["key"], None)
        if "electric-up-to-date" in headers:
            break
        parameters |= {"offset": headers["electric-offset"], "handle": headers["electric-handle"]}
    if as_json:
        print_json(list(rows.values()))
        return
    for row in rows.values():
        print(json.dumps(row))


def live_shapes(config: Config) -> list[dict[str, Any]]:
    """The shapes of the configured node; none while it is down, for they live in it, and none where it tells nobody."""
    try:
        return list(json.loads(_ask(config, "/api/shapes", {})[1]))
    except (Unavailable, Invalid):
        return []


def _get(config: ConfigOption, path: str, parameters: dict[str, str]) -> tuple[Any, bytes]:
    return _ask(load(config), path, parameters)


def _ask(config: Config, path: str, parameters: dict[str, str]) -> tuple[Any, bytes]:
    address = config.node.http
    url = f"http{'s' if config.http.tls else ''}://{address}{path}"
    token = os.environ.get(TOKEN, "")
    request = Request(
        url + (f"?{urlencode(parameters)}" if parameters else ""),
        headers={"authorization": f"Bearer {token}"} if token else {},
    )
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.headers, answer.read()
    except HTTPError as error:
        message = error.read().decode(errors="replace")
        if error.code == 404:
            raise Missing(f"the node answered 404: {message}") from error
        raise Invalid(f"the node answered {error.code}: {message}") from error
    except URLError as error:
        raise Unavailable(
            f"no node answers: address={address} error={error.reason}.", fix="Start one with: tidemill up"
        ) from error
