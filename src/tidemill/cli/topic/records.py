"""`tidemill topic produce` and `topic consume`: records between a topic and the terminal, through librdkafka."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.base.address import Address, strip_brackets
from tidemill.base.config.config import Config, load
from tidemill.base.errors import InvalidError
from tidemill.cli.context import ConfigOption

Topic = Annotated[str, typer.Argument(help="Topic name.")]
Bootstrap = Annotated[
    str, typer.Option("--bootstrap", "-b", help="host:port of a node. Default: from the configuration.")
]
Client = Annotated[
    list[str] | None,
    typer.Option("--client", "-X", help="A librdkafka property, NAME=VALUE (for security, …). Repeatable."),
]
Partition = Annotated[list[int] | None, typer.Option("--partition", "-p", help="Read only this partition. Repeatable.")]


def produce(
    name: Topic,
    file: Annotated[Path | None, typer.Argument(help="File with one record per line. Default: standard input.")] = None,
    key_separator: Annotated[str, typer.Option("--key", "-K", help="Separator between key and value.")] = "",
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", help="Header for every record, NAME=VALUE. Repeatable.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Each line is a JSON object, as written by `topic consume --json`.")
    ] = False,
    tombstones: Annotated[bool, typer.Option("--tombstones", help="An empty value is a tombstone (null).")] = False,
    partition: Annotated[int, typer.Option("--partition", "-p", help="Partition to write to. Default: by key.")] = -1,
    bootstrap: Bootstrap = "",
    client: Client = None,
    config: ConfigOption = None,
) -> None:
    """Write lines to a topic, one record per line. Exit 0 only when every record is acknowledged."""
    from tidemill.cli.topic import client as kafka_client
    from tidemill.cli.topic.line_format import JsonLineParser, TextLineParser

    settings = _client_settings(bootstrap, client, config)
    headers = [_parse_pair(text, "header") for text in header or ()]
    lines = JsonLineParser(headers) if as_json else TextLineParser(key_separator, headers, tombstones=tombstones)
    if file is None:
        done = kafka_client.produce(settings, name, partition, sys.stdin.buffer, lines)
    else:
        if not file.is_file():
            raise InvalidError(
                f"no such file: path={file}.", fix="Name a file of lines, or omit it to read standard input."
            )
        with file.open("rb") as source:
            done = kafka_client.produce(settings, name, partition, source, lines)
    print(done.summary(name), file=sys.stderr)
    raise typer.Exit(done.exit_code)


def consume(
    name: Topic,
    begin: Annotated[
        str, typer.Option("--from", help="First position: start, end, an offset, -N (the last N), or @MS (a time).")
    ] = "start",
    end: Annotated[
        str, typer.Option("--to", help="Position to stop before: end (the current end), an offset, or @MS.")
    ] = "end",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new records until Ctrl-C.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Print at most this many records; 0 = all.")] = 0,
    partition: Partition = None,
    keys: Annotated[bool, typer.Option("--keys", "-k", help="Print the key and a tab before each value.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Print the headers and a tab before that.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each record as a JSON object on one line.")] = False,
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Include records of open and aborted transactions.")
    ] = False,
    bootstrap: Bootstrap = "",
    client: Client = None,
    config: ConfigOption = None,
) -> None:
    """Print records of a topic, one per line. No offsets are committed: the command reads without a group."""
    from tidemill.cli.topic import client as kafka_client
    from tidemill.cli.topic.line_format import format_json_line, format_text_line

    settings = _client_settings(bootstrap, client, config)
    settings["isolation.level"] = "read_uncommitted" if uncommitted else "read_committed"
    asked = kafka_client.ConsumeRange(begin, "" if follow else end, tuple(partition or ()), count)

    def line(message: Any) -> bytes:
        return format_json_line(message) if as_json else format_text_line(message, keys=keys, headers=headers)

    raise typer.Exit(kafka_client.consume(settings, name, asked, line, sys.stdout.buffer))


def _client_settings(bootstrap: str, client: list[str] | None, path: Path | None) -> dict[str, Any]:
    given = dict(_parse_pair(text, "client") for text in client or ())
    return {"bootstrap.servers": bootstrap or kafka_address(load(path)), "client.id": "tidemill", **given}


def kafka_address(config: Config) -> str:
    """Return the address at which clients find the node of this configuration."""
    bound = Address.parse(config.node.kafka)
    return config.kafka.advertised or str(
        Address(strip_brackets(config.node.advertised_host) or bound.host, bound.port)
    )


def _parse_pair(text: str, what: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidError(f"invalid {what}: {text!r}.", fix="Write it as NAME=VALUE.")
    return key, value
