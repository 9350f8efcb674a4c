"""`tidemill shape`: list the live shapes of a node, fetch one over HTTP like any client, or sign a URL of one."""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import msgspec
import typer

from tidemill.base.address import Address
from tidemill.base.config.config import Config, load
from tidemill.base.config.listeners import SigningSection
from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.base.runtime.tasks import error_sentence
from tidemill.cli.context import ConfigOption
from tidemill.cli.output.output import TABLE, Output

if TYPE_CHECKING:
    from tidemill.shapes.definition.planner import ShapeRequest

TOKEN_VARIABLE = "TIDEMILL_TOKEN"
"""Environment variable with a bearer token, for nodes that require one."""
SHAPE_TIMEOUT_S = 60.0
LIST_TIMEOUT_S = 10.0
"""Maximum silence of a node, before it answers or in the middle of an answer."""
_HOST_MISMATCHES = 62, 64
"""Codes of OpenSSL for a certificate that names another host, and another address."""

app = typer.Typer(help="List and fetch shapes, and sign shape URLs.", no_args_is_help=True)
Table = Annotated[str, typer.Argument(help="schema.table of a captured database, or tidemill.NAME.")]
Where = Annotated[str, typer.Option(help="Filter, in PostgreSQL syntax.")]


@app.command("list")
def list_shapes(config: ConfigOption = None, out: Output = TABLE) -> None:
    """List the shapes that the node currently serves."""
    shapes = _request_node(load(config), "/api/shapes", {}, LIST_TIMEOUT_S)[1]
    out.rows(shapes, empty="no shapes")


@app.command("get")
def get(
    table: Table,
    where: Where = "",
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Print the current rows of a shape."""
    parameters = {"table": table, "offset": "-1", **({"where": where} if where else {})}
    rows, loaded = dict[str, Any](), load(config)
    while True:
        headers, items = _request_node(loaded, "/v1/shape", parameters)
        for item in items:
            operation = item["headers"].get("operation")
            if operation in ("insert", "update"):
                rows[item["key"]] = {**rows.get(item["key"], {}), **item["value"]}
            elif operation == "delete":
                rows.pop(item["key"], None)
        if "electric-up-to-date" in headers:
            break
        parameters |= {"offset": headers["electric-offset"], "handle": headers["electric-handle"]}
    out.rows(list(rows.values()), empty="no rows", null="NULL")


@dataclass(frozen=True)
class DefinitionOptions:
    """Definition of a shape, as in the parameters of its URL."""

    table: Table
    where: Where = ""
    param: Annotated[list[str] | None, typer.Option(help="Value of $1, $2, …; give the option once for each.")] = None
    columns: Annotated[str, typer.Option(help="Columns to show, comma-separated. Default: all.")] = ""
    replica: Annotated[str, typer.Option(help="default, or full: updates contain whole rows and old values.")] = (
        "default"
    )
    log: Annotated[str, typer.Option(help="full, or changes_only: omit the initial rows.")] = "full"


@app.command("sign")
def sign(
    shape: DefinitionOptions,
    expires_s: Annotated[int, typer.Option(help="Seconds from now until the URL expires.", min=1)] = 3_600,
    key: Annotated[str, typer.Option(help="Id of the signing key. Default: security.signing.use.")] = "",
    url: Annotated[str, typer.Option(help="URL at which clients reach the node. Default: node.http.")] = "",
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Print a URL that shows one shape to anyone who has it, until it expires. No node needs to run."""
    from tidemill.base.clock import SystemClock
    from tidemill.shapes.definition.signed_urls import canonical_request, signed_url_params

    loaded = load(config)
    signing = loaded.security.signing
    key_id = _signing_key(signing, key)
    if expires_s > signing.max_s:
        raise InvalidError(
            f"the URL would be valid for too long: expires_s={expires_s} limit_s={signing.max_s}.",
            fix="Choose a shorter time, or raise security.signing.max_s.",
        )
    request, expires = canonical_request(_parse_shape(shape)), SystemClock().now_ms() // 1000 + expires_s
    start = url or f"http{'s' if loaded.http.tls else ''}://{loaded.node.http}"
    query = urlencode(signed_url_params(request, expires, key_id, signing.keys[key_id]))
    signed = f"{start.rstrip('/')}/v1/shape?{query}"
    out.one({"url": signed, "expires": expires, "key": key_id, "table": request.table}, signed)


def _parse_shape(shape: DefinitionOptions) -> ShapeRequest:
    """Parse the definition as the node does. Raises InvalidError."""
    from starlette.datastructures import QueryParams

    from tidemill.shapes.http.params import parse_definition
    from tidemill.shapes.where import WhereError, param_numbers

    values = [(f"params[{number}]", value) for number, value in enumerate(shape.param or [], 1)]
    given = {name: getattr(shape, name) for name in ("table", "where", "columns", "replica", "log")}
    errors: dict[str, list[str]] = {}
    asked = parse_definition(QueryParams([*given.items(), *values]), errors)
    try:
        used = param_numbers(shape.where) if shape.where else set()
    except WhereError as error:
        raise InvalidError(f"bad value: where: {error.message.rstrip('.')}.", fix="Correct --where.") from error
    if used != set(range(1, len(values) + 1)):
        errors["params"] = [f"the clause uses {sorted(used)}, but {len(values)} values are given"]
    if errors:
        raise InvalidError(f"bad value: {'; '.join(f'{field}: {said[0]}' for field, said in errors.items())}.")
    return asked


def _signing_key(signing: SigningSection, asked: str) -> str:
    """Return the id of the key to sign with. Raises InvalidError."""
    if not signing.keys:
        raise InvalidError("no signing key is configured.", fix='Set security.signing.keys, as { k1 = "${NAME}" }.')
    key_id = asked or signing.use or (next(iter(signing.keys)) if len(signing.keys) == 1 else "")
    if key_id not in signing.keys:
        known = ", ".join(signing.keys)
        what = f"no such key: key={key_id}." if key_id else "several signing keys are configured."
        raise InvalidError(what, fix=f"Name one with --key or security.signing.use. Known keys: {known}.")
    return key_id


def _error_text(body: bytes) -> str:
    """Return the sentences of an error: {"message", "errors": {parameter: [sentence]}}, or text."""
    try:
        said = json.loads(body)
        errors = [f"{name}: {text}" for name, texts in said.get("errors", {}).items() for text in texts]
        return "; ".join(errors) or str(said["message"])
    except (ValueError, TypeError, LookupError, AttributeError):
        return body.decode(errors="replace").strip()


def live_shapes(config: Config) -> list[dict[str, Any]]:
    """Return the shapes of the configured node; none while it is down, because shapes exist only in it.

    Raises InvalidError if a running node refuses to list them, UnavailableError if it does not answer properly.
    """
    try:
        return _request_node(config, "/api/shapes", {}, LIST_TIMEOUT_S)[1]
    except MissingError:  # a server without shapes
        return []
    except UnavailableError as error:
        if _accepts_no_connection(error):
            return []
        raise
    except InvalidError as error:
        fix = f"Set {TOKEN_VARIABLE} to a token with DESCRIBE of the cluster, and shapes.secret to that of the node."
        raise InvalidError(error.message, fix=fix) from error


def _accepts_no_connection(error: UnavailableError) -> bool:
    reason = error.__cause__.reason if type(error.__cause__) is URLError else None
    return isinstance(reason, OSError) and not isinstance(reason, TimeoutError | ssl.SSLError)


def open_node(request: Request, timeout_s: float, context: ssl.SSLContext | None = None) -> Any:
    """Send a request to a node and return its response, as `urlopen`, whose errors it raises. The proxy of the
    environment (http_proxy, https_proxy) is not used: the node is on this machine or in its network."""
    return build_opener(ProxyHandler({}), HTTPSHandler(context=context)).open(request, timeout=timeout_s)


def _tls_context(bound: Address) -> ssl.SSLContext:
    """Return how to verify the certificate of the node. A connection to a loopback address does not leave this machine,
    and the certificate names the host that other machines use, so there its authority alone is verified."""
    context = ssl.create_default_context()
    context.check_hostname = not (bound.is_wildcard or bound.is_loopback)
    return context


def _tls_fix(error: ssl.SSLError, bound: Address) -> str:
    if not isinstance(error, ssl.SSLCertVerificationError):
        return "Check http.tls, and whether security.tls.client_auth requires a certificate, which this command lacks."
    if error.verify_code in _HOST_MISMATCHES:
        return f"Use a certificate that names {bound.host}, or set node.http to a host that the certificate names."
    return "Name the authority of its certificate in SSL_CERT_FILE, and check http.tls."


def _request_node(
    config: Config, path: str, parameters: dict[str, str], timeout_s: float = SHAPE_TIMEOUT_S
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the headers and the list of an answer. Raises MissingError, InvalidError, UnavailableError."""
    if config.shapes.secret:
        parameters = parameters | {"secret": config.shapes.secret}
    bound = Address.parse(config.node.http)
    address, context = bound.reachable, _tls_context(bound) if config.http.tls else None
    url = f"http{'s' if config.http.tls else ''}://{address}{path}"
    token = os.environ.get(TOKEN_VARIABLE, "")
    request = Request(
        url + (f"?{urlencode(parameters)}" if parameters else ""),
        headers={"authorization": f"Bearer {token}"} if token else {},
    )
    try:
        with open_node(request, timeout_s, context) as answer:
            return answer.headers, msgspec.json.decode(answer.read(), type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise UnavailableError(
            f"another server answers at the node's address: address={address} error={error}.",
            fix="Correct node.http, or end that server.",
        ) from error
    except HTTPError as error:
        said = f"the node answered {error.code}: {_error_text(error.read())}"
        if error.code == 404:
            raise MissingError(said) from error
        if error.code >= 500:
            raise UnavailableError(said) from error
        raise InvalidError(said) from error
    except TimeoutError as error:
        raise UnavailableError(
            f"the node does not answer: address={address} waited_s={timeout_s:g}.",
            fix="Find out what it waits for: tidemill why",
        ) from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        text = str(reason) if isinstance(error, URLError) else error_sentence(error)
        fix = _tls_fix(reason, bound) if isinstance(reason, ssl.SSLError) else "Start one with: tidemill up"
        raise UnavailableError(f"the node does not answer: address={address} error={text}.", fix=fix) from error
