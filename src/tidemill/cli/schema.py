"""`tidemill schema`: the schema registry, directly on the stores that the configuration names. No node needs to run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.base.errors import InvalidError
from tidemill.base.libraries import require
from tidemill.cli.context import ConfigOption, DryRunOption, OpenStores, YesOption, confirm, open_stores, preview
from tidemill.cli.output.output import TABLE, Output

if TYPE_CHECKING:
    from tidemill.metastore.rows.registry import Reference
    from tidemill.registry.registry import Registry
    from tidemill.registry.schema import SubmittedSchema

app = typer.Typer(help="List, show, register, delete and check schemas.", no_args_is_help=True)
Subject = Annotated[str, typer.Argument(help="Subject name; Kafka clients use TOPIC-value and TOPIC-key.")]
File = Annotated[Path, typer.Argument(help="File with the schema.")]
Kind = Annotated[
    str, typer.Option("--type", help="AVRO, JSON or PROTOBUF. Default: by the file's suffix (.avsc, .json, .proto).")
]
References = Annotated[
    list[str] | None,
    typer.Option("--reference", help="A schema that this one refers to, as NAME=SUBJECT:VERSION; repeatable."),
]
Normalize = Annotated[bool, typer.Option("--normalize", help="Treat schemas that differ only in notation as equal.")]
Version = Annotated[int | None, typer.Option("--version", help="Version number. Default: the latest.", min=1)]
KINDS = {".avsc": "AVRO", ".json": "JSON", ".proto": "PROTOBUF"}


@app.command("list")
def list_schemas(
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Include versions that were deleted, but not permanently.")
    ] = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """List the subjects with their versions."""
    with open_stores(config) as opened:
        registry = _open_registry(opened)
        found: dict[str, dict[str, Any]] = {}
        for row in opened.portal.call(registry.book.all_versions()):
            if deleted or not row.deleted:
                subject = found.setdefault(row.subject, {"subject": row.subject, "versions": [], "ids": []})
                subject["versions"].append(row.version)
                subject["ids"].append(row.id)
        for name, subject in found.items():
            subject["compatibility"] = opened.portal.call(registry.level(name))
    out.rows(list(found.values()), empty="no schemas")


@app.command("show")
def show_schema(subject: Subject, version: Version = None, config: ConfigOption = None, out: Output = TABLE) -> None:
    """Show one version of a subject."""
    from tidemill.registry.http.messages import version_body

    with open_stores(config) as opened:
        found = opened.portal.call(_open_registry(opened).find(subject, version, deleted=bool(version)))
    body = version_body(found.version, found.schema, "")
    head = f"{subject}  version {found.version.version}  id {found.version.id}  {found.schema.kind}"
    out.one(body, f"{head}\n{body['schema']}")


@app.command("register")
def register(
    subject: Subject,
    file: File,
    kind: Kind = "",
    reference: References = None,
    normalize: Normalize = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Register a schema. A schema that the subject already has keeps its version."""
    given = _read_schema_file(file, kind, reference, normalize)
    with open_stores(config, create=True) as opened:
        found = opened.portal.call(_open_registry(opened).register(_checked_subject(subject), given))
    row = {"subject": subject, "version": found.version.version, "id": found.version.id}
    out.one(row, f"{subject}  version {found.version.version}  id {found.version.id}")


@app.command("delete")
def delete(
    subject: Subject,
    version: Version = None,
    permanent: Annotated[
        bool, typer.Option("--permanent", help="Delete permanently; the subject or version must be deleted already.")
    ] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Delete a subject, or one version of it. The first deletion hides it; a second one with --permanent removes it."""
    with open_stores(config) as opened:
        if dry_run:
            found = opened.portal.call(_open_registry(opened).versions_to_delete(subject, version, permanent=permanent))
            row = {"subject": subject, "deleted": found, "permanent": permanent}
            preview(out, row, f"delete {_format_versions(subject, found, permanent)}")
            return
        if permanent:
            confirm(f"Delete {subject} permanently?", yes=yes, out=out)
        numbers = opened.portal.call(_open_registry(opened).delete(subject, version, permanent=permanent))
    row = {"subject": subject, "deleted": numbers, "permanent": permanent}
    out.one(row, f"deleted {_format_versions(subject, numbers, permanent)}")


@app.command("check")
def check(
    subject: Subject,
    file: File,
    kind: Kind = "",
    reference: References = None,
    normalize: Normalize = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Check whether a schema could be registered. Exit 0 if so, else 1 with the reasons."""
    given, name = _read_schema_file(file, kind, reference, normalize), _checked_subject(subject)
    with open_stores(config) as opened:
        registry = _open_registry(opened)
        found = opened.portal.call(registry.check_compatibility(name, given, None, all_versions=True))
        level = opened.portal.call(registry.level(name))
    row = {"subject": subject, "compatibility": level, "is_compatible": not found, "messages": found}
    out.one(row, "\n".join(found) if found else f"compatible ({level})")
    if found:
        raise typer.Exit(1)


def _format_versions(subject: str, numbers: list[int], permanent: bool) -> str:
    return f"{subject} versions {', '.join(map(str, numbers))}{' permanently' if permanent else ''}"


def _open_registry(opened: OpenStores) -> Registry:
    from tidemill.registry.registry import Registry
    from tidemill.shards.api import run_inline

    settings = opened.config.registry
    return Registry(opened.metastore, opened.clock, opened.rand, run_inline, settings)


def _checked_subject(subject: str) -> str:
    from tidemill.registry.http.messages import parse_subject

    return parse_subject(subject)


def _read_schema_file(file: Path, kind: str, references: list[str] | None, normalize: bool) -> SubmittedSchema:
    from tidemill.registry.schema import SubmittedSchema

    require("fastavro")
    kind = kind.upper() or KINDS.get(file.suffix, "")
    if not kind:
        raise InvalidError(f"the schema type is unknown: file={file}.", fix="Give --type AVRO, JSON or PROTOBUF.")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidError(
            f"the schema cannot be read: file={file} reason={reason}.", fix="Give a readable file."
        ) from error
    return SubmittedSchema(kind, text, tuple(_parse_reference(one) for one in references or ()), normalize)


def _parse_reference(text: str) -> Reference:
    from tidemill.metastore.rows.registry import Reference

    name, _, place = text.partition("=")
    subject, _, version = place.rpartition(":")
    if not name or not subject or not version.isascii() or not version.isdigit():
        raise InvalidError(f"invalid reference: reference={text!r}.", fix="Write it as NAME=SUBJECT:VERSION")
    return Reference(name, subject, int(version))
