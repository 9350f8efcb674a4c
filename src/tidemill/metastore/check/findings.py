"""Findings of a check: broken references, one line each, and counts of what was checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from tidemill.metastore.api import Chunk


class Finding(msgspec.Struct, frozen=True):
    """One problem. `subject` refers to `target` ("" if the subject itself is wrong); `problem` says what is wrong."""

    subject: str
    target: str
    problem: str
    fix: str

    def __str__(self) -> str:
        arrow = f" → {self.target}" if self.target else ""
        return f"{self.subject}{arrow}: {self.problem}. {self.fix}"


class Findings:
    """Collector of findings. `progress(what, done, total)`: total 0 = unknown."""

    def __init__(self, progress: Callable[[str, int, int], None] = lambda *_: None) -> None:
        self.broken: list[Finding] = []
        self.walked: Counter[str] = Counter()
        self.orphans: Counter[str] = Counter()
        """Number of unreferenced items by kind: harmless, deleted later."""
        self.orphan_bytes = 0
        self.progress = progress

    def add(self, subject: str, target: str, problem: str, fix: str) -> None:
        self.broken.append(Finding(subject, target, problem, fix))

    def include(self, other: Findings) -> None:
        """Add the findings of another check."""
        self.broken += other.broken
        self.walked += other.walked
        self.orphans += other.orphans
        self.orphan_bytes += other.orphan_bytes

    @property
    def clean(self) -> bool:
        return not self.broken


class RowSource(Protocol):
    """Rows of one point in time: a snapshot of the domains, or the manifests of a bucket."""

    def prefix(self, prefix: bytes) -> AsyncIterator[Chunk]:
        """Yield live rows whose key begins with `prefix`, in key order over all domains."""
        ...
