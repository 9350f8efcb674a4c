"""References from rows to objects of the bucket, compared with one listing.

Objects are listed after the rows were read, so that one which was written meanwhile counts as an orphan at worst.
A missing one is looked at by itself once more before it is a finding.
"""

from __future__ import annotations

from collections import Counter

from tidemill.metastore.check.findings import Findings
from tidemill.objects.store import ObjectStore

PREFIXES = ("l0/", "l1/", "shards/")
"""What rows refer to. Rollups of partitions are named by their logs, files of domains by manifests."""

YOUNG_MS = 3_600_000
"""An object younger than this may be about to be referred to: it is no orphan."""

FIX = "Bring the object back from a copy of the bucket; what refers to it cannot be read until then."


class References:
    """Which bytes of which objects are referred to, and by what. About 200 bytes an object."""

    def __init__(self) -> None:
        self._needed: dict[str, int] = {}
        self._by: dict[str, str] = {}
        self._count: Counter[str] = Counter()

    def add(self, subject: str, key: str, end_byte: int) -> None:
        """`subject` needs bytes [0, end_byte) of `key`. The first of several subjects is named."""
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
                    self._short(findings, found.key, found.size_bytes, needed)
        for key, needed in left.items():
            meta = await objects.head(key)
            if meta is None:
                findings.add(self._subject(key), key, "the object is missing", FIX)
            elif meta.size_bytes < needed:
                self._short(findings, key, meta.size_bytes, needed)

    def _short(self, findings: Findings, key: str, size_bytes: int, needed: int) -> None:
        findings.add(self._subject(key), key, f"the object has {size_bytes} bytes, {needed} are referred to", FIX)

    def _subject(self, key: str) -> str:
        others = self._count[key] - 1
        return self._by[key] + (f" and {others} more" if others else "")
