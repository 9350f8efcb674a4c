"""Part of the deep check for the schema registry.

version ─► schema      use ─► version      referrer ─► version, schema      digest ─► schema      head ─► counts
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

import msgspec

from tidemill.metastore.check.findings import Findings
from tidemill.metastore.rows import DIGESTS, REFERRERS, REGISTRY_CONFIGS, REGISTRY_HEADS, SCHEMAS, USES, VERSIONS
from tidemill.metastore.rows.registry import RegistryHeadRow
from tidemill.metastore.rows.row_family import Family

R = TypeVar("R", bound=msgspec.Struct)
FIX = "Restore from an older manifest, or register the schema again and report this with the row's key."


class RegistryRowReader(Protocol):
    """Iteration over the decodable rows of a family."""

    def __call__(self, family: Family[R]) -> AsyncIterator[R]: ...


async def check_registry(each: RegistryRowReader, findings: Findings) -> None:
    """Check the registry's rows. Raises UnavailableError; every other problem is a finding."""
    digests: dict[int, str] = {}
    referring: set[tuple[str, int, int]] = set()
    async for schema in each(SCHEMAS):
        digests[schema.id] = schema.digest
        referring |= {(r.subject, r.version, schema.id) for r in schema.references}
    versions: dict[tuple[str, int], int] = {}
    async for version in each(VERSIONS):
        versions[version.subject, version.version] = version.id
        if version.id not in digests:
            _add_finding(
                findings, f"version {version.subject}/{version.version}", f"schema {version.id}", "it does not exist"
            )
    uses = {(use.subject, use.version): use.id async for use in each(USES)}
    for place in sorted(uses.items() ^ versions.items()):
        (subject, number), schema_id = place
        _add_finding(
            findings, f"schema {schema_id}", f"version {subject}/{number}", "use row and version row do not match"
        )
    for schema_id in sorted(digests.keys() - set(versions.values())):
        _add_finding(findings, f"schema {schema_id}", "", "no version uses it")
    known: dict[int, str] = {}
    async for row in each(DIGESTS):
        known |= dict.fromkeys(row.ids, row.digest)
    for schema_id, digest in known.items():
        if digests.get(schema_id) != digest:
            _add_finding(findings, f"digest {digest}", f"schema {schema_id}", "the schema has another digest")
    for schema_id, digest in digests.items():
        if schema_id not in known:
            _add_finding(findings, f"schema {schema_id}", f"digest {digest}", "its digest row is missing")
    found = {(row.subject, row.version, row.id) async for row in each(REFERRERS)}
    for subject, number, schema_id in sorted(found ^ referring):
        target = f"version {subject}/{number}"
        _add_finding(findings, f"schema {schema_id}", target, "reference and referrer row do not match")
    for subject, number, schema_id in sorted(referring):
        if (subject, number) not in versions:
            _add_finding(
                findings,
                f"schema {schema_id}",
                f"version {subject}/{number}",
                "the version that it refers to does not exist",
            )
    configs = len([row async for row in each(REGISTRY_CONFIGS)])
    heads = [row async for row in each(REGISTRY_HEADS)]
    counted = (len(digests), len({subject for subject, _ in versions}), len(versions), configs)
    _check_head(findings, heads, counted, max(digests, default=0))


def _check_head(findings: Findings, heads: list[RegistryHeadRow], counted: tuple[int, ...], last_id: int) -> None:
    head = heads[0] if heads else RegistryHeadRow("head")
    recorded = (head.schemas, head.subjects, head.versions, head.configs)
    if recorded != counted:
        problem = f"it counts {recorded} schemas, subjects, versions and configurations, but there are {counted}"
        _add_finding(findings, "registry head", "", problem)
    if head.next_id <= last_id:
        _add_finding(findings, "registry head", f"schema {last_id}", f"its next id {head.next_id} is already assigned")


def _add_finding(findings: Findings, subject: str, target: str, problem: str) -> None:
    findings.add(subject, target, problem, FIX)
