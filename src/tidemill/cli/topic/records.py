"""`tidemill topic produce` and `topic consume`: records between a topic and the terminal, through librdkafka."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.base.config.config import Config, advertised_addresses, load
from tidemill.base.errors import InvalidError
from tidemill.cli.context import ConfigOption
from tidemill.cli.output.output import TABLE, Form, Output

Topic = Annotated[str, typer.Argument(help="Topic name.")]


@dataclass(frozen=True)
class ClientOptions:
    """Connection to a node."""

    bootstrap: Annotated[
        str, typer.Option("--bootstrap", "-b", help="host:port of a node. Default: from the configuration.")
    ] = ""
    client: Annotated[
        list[str] | None,
        typer.Option("--client", "-X", help="A librdkafka property, NAME=VALUE (for security, …). Repeatable."),
    ] = None
    config: ConfigOption = None

    def settings(self) -> dict[str, Any]:
        """Return the properties of the librdkafka client. Raises InvalidError."""
        given = dict(_parse_pair(text, "client") for text in self.client or ())
        bootstrap = self.bootstrap or kafka_address(load(self.config))
        return {"bootstrap.servers": bootstrap, "client.id": "tidemill", **given}


@dataclass(frozen=True)
class InputOptions:
    """Format of the lines that become records."""

    key_separator: Annotated[str, typer.Option("--key", "-K", help="Separator between key and value.")] = ""
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", help="Header for every record, NAME=VALUE. Repeatable.")
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Each line is a JSON object, as written by `topic consume --json`.")
    ] = False
    tombstones: Annotated[bool, typer.Option("--tombstones", help="An empty value is a tombstone (null).")] = False


@dataclass(frozen=True)
class RangeOptions:
    """Records to read."""

    begin: Annotated[
        str, typer.Option("--from", help="First position: start, end, an offset, -N (the last N), or @MS (a time).")
    ] = "start"
    end: Annotated[
        str, typer.Option("--to", help="Position to stop before: end (the current end), an offset, or @MS.")
    ] = "end"
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new records until Ctrl-C.")] = False
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Print at most this many records; 0 = all.")] = 0
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", help="Read only this partition. Repeatable.")
    ] = None


@dataclass(frozen=True)
class LineOptions:
    """Parts of the printed lines."""

    keys: Annotated[bool, typer.Option("--keys", "-k", help="Print the key and a tab before each value.")] = False
    headers: Annotated[bool, typer.Option("--headers", help="Print the headers and a tab before that.")] = False


def produce(
    name: Topic,
    file: Annotated[Path | None, typer.Argument(help="File with one record per line. Default: standard input.")] = None,
    *,
    form: InputOptions,
    partition: Annotated[int, typer.Option("--partition", "-p", help="Partition to write to. Default: by key.")] = -1,
    client: ClientOptions,
) -> None:
    """Write lines to a topic, one record per line. Exit 0 only when every record is acknowledged."""
    from tidemill.cli.topic import client as kafka_client
    from tidemill.cli.topic.line_format import JsonLineParser, TextLineParser

    settings = client.settings()
    headers = [_parse_pair(text, "header") for text in form.header or ()]
    text = TextLineParser(form.key_separator, headers, tombstones=form.tombstones)
    lines = JsonLineParser(headers) if form.as_json else text
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
    records: RangeOptions,
    form: LineOptions,
    out: Output = TABLE,
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Include records of open and aborted transactions.")
    ] = False,
    *,
    client: ClientOptions,
) -> None:
    """Print records of a topic, one per line: the values, or with -o each record as a JSON object or as CSV.

    No offsets are committed: the command reads without a group.
    """
    from tidemill.cli.topic import client as kafka_client
    from tidemill.cli.topic.line_format import FIELDS, format_csv_line, format_json_line, format_text_line

    settings = client.settings()
    settings["isolation.level"] = "read_uncommitted" if uncommitted else "read_committed"
    asked = kafka_client.ConsumeRange(
        records.begin, "" if records.follow else records.end, tuple(records.partition or ()), records.count
    )

    def line(message: Any) -> bytes:
        if not out.is_text:
            return format_csv_line(message) if out.form is Form.CSV else format_json_line(message)
        return format_text_line(message, keys=form.keys, headers=form.headers)

    out.begin_rows(FIELDS)
    raise typer.Exit(kafka_client.consume(settings, name, asked, line, sys.stdout.buffer))


def kafka_address(config: Config) -> str:
    """Return the address at which clients find the node of this configuration."""
    return str(advertised_addresses(config)["node.kafka"])


def _parse_pair(text: str, what: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidError(f"invalid {what}: {text!r}.", fix="Write it as NAME=VALUE.")
    return key, value
