"""References from rows to objects of the bucket, compared with one listing.

Objects are listed after the rows were read, so that an object written in the meantime counts as an orphan at worst.
A missing object is requested individually before it becomes a finding.
"""

from __future__ import annotations

from collections import Counter

from tidemill.metastore.check.findings import Findings
from tidemill.objects.store import ObjectStore

PREFIXES = ("l0/", "l1/", "shards/")
"""Prefixes of objects that rows refer to. Logs refer to rollups of partitions, manifests to files of domains."""

YOUNG_MS = 3_600_000
"""Minimum age of an orphan. A younger object may be about to be referenced."""

FIX = "Restore the object from a copy of the bucket; until then the data that refers to it cannot be read."


class References:
    """Referenced bytes of objects, and who refers to them. About 200 bytes of memory per object."""

    def __init__(self) -> None:
        self._needed: dict[str, int] = {}
        self._by: dict[str, str] = {}
        self._count: Counter[str] = Counter()

    def add(self, subject: str, key: str, end_byte: int) -> None:
        """Record that `subject` needs bytes [0, end_byte) of `key`. Of several subjects the first is named in
        findings."""
        self._needed[key] = max(end_byte, self._needed.get(key, 0))
        self._by.setdefault(key, subject)
        self._count[key] += 1

    def __len__(self) -> int:
        return len(self._needed)

    async def check(self, objects: ObjectStore, findings: Findings, now_ms: int) -> None:
        left = dict(self._needed)
        for prefix in PREFIXES:
            async for found in objects.list(prefix):
                findings.walked["objects"] += 1
                findings.progress("objects", findings.walked["objects"], 0)
                needed = left.pop(found.key, None)
                if needed is None:
                    if now_ms - found.modified_ms > YOUNG_MS:
                        findings.orphans["objects"] += 1
                        findings.orphan_bytes += found.size_bytes
                    continue
                if found.size_bytes < needed:
                    self._add_too_short(findings, found.key, found.size_bytes, needed)
        for key, needed in left.items():
            meta = await objects.head(key)
            if meta is None:
                findings.add(self._subject(key), key, "the object is missing", FIX)
            elif meta.size_bytes < needed:
                self._add_too_short(findings, key, meta.size_bytes, needed)

    def _add_too_short(self, findings: Findings, key: str, size_bytes: int, needed: int) -> None:
        findings.add(self._subject(key), key, f"the object has {size_bytes} bytes, {needed} are referred to", FIX)

    def _subject(self, key: str) -> str:
        others = self._count[key] - 1
        return self._by[key] + (f" and {others} more" if others else "")
