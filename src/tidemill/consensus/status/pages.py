"""Split a report into pages that fit a register, for any number of statuses and facts. Pure.

A status or a fact stays on its page for as long as it exists, so a page changes only when one of its entries does.
Pages that lost entries accept new ones. A growing report therefore adds pages; no value grows.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidemill.base.limits import PAGE_BYTES, PAGE_ENTRY_BYTES
from tidemill.base.status.status import StageStatus, StatusReport

NAME_CHARS = 300
TEXT_CHARS = 600


class ReportPage(msgspec.Struct, frozen=True):
    marks: list[StageStatus]
    facts: dict[str, object]


class _EncodedPage(msgspec.Struct, frozen=True):
    """A `ReportPage` whose entries are already encoded."""

    marks: list[msgspec.Raw]
    facts: dict[str, msgspec.Raw]


class ReportHead(msgspec.Struct, frozen=True):
    """The `report` without statuses and facts; those are in pages 0 … pages − 1."""

    report: StatusReport
    pages: int


_encode = msgspec.msgpack.Encoder(enc_hook=repr).encode
_decode_page = msgspec.msgpack.Decoder(ReportPage).decode
_decode_head = msgspec.msgpack.Decoder(ReportHead).decode


class Pager:
    """Assignment of one process's report entries to pages; caches the encoding of unchanged statuses."""

    def __init__(self) -> None:
        self._page_of: dict[str, int] = {}
        self._marks: dict[str, tuple[StageStatus, bytes]] = {}

    def split(self, report: StatusReport) -> tuple[bytes, list[bytes]]:
        """Return the head, and every page in order, each below a register's limit."""
        known, self._marks = self._marks, {}
        for mark in report.marks:
            name = mark.name[:NAME_CHARS]
            old = known.get(name)
            # A tracker returns the same object while nothing in it changes, which is true of nearly all of many
            # thousands.
            self._marks[name] = old if old is not None and old[0] is mark else (mark, _encode(_truncate_status(mark)))
        facts = {name[:NAME_CHARS]: encode_fact(fact) for name, fact in report.facts.items()}
        entries = {"m" + name: data for name, (_, data) in self._marks.items()}
        entries |= {"f" + name: data for name, data in facts.items()}
        pages = [
            _EncodedPage([], {}) for _ in range(self._assign_pages({name: len(data) for name, data in entries.items()}))
        ]
        for name, data in entries.items():
            page = pages[self._page_of[name]]
            if name[0] == "m":
                page.marks.append(msgspec.Raw(data))
            else:
                page.facts[name[1:]] = msgspec.Raw(data)
        head = ReportHead(msgspec.structs.replace(report, marks=(), facts={}), len(pages))
        return _encode(head), [_encode(page) for page in pages]

    def _assign_pages(self, sizes: dict[str, int]) -> int:
        """Assign a page to every entry; return the number of pages. Each holds at most PAGE_BYTES plus one entry."""
        kept: dict[str, int] = {}
        full: list[int] = []
        waiting: list[str] = []
        for name, size in sizes.items():
            page = self._page_of.get(name, -1)
            if page < 0:
                waiting.append(name)
                continue
            full.extend([0] * (page + 1 - len(full)))
            if full[page] >= PAGE_BYTES:
                waiting.append(name)  # an entry on that page has grown
                continue
            kept[name] = page
            full[page] += size
        page = 0
        for name in waiting:
            while page < len(full) and full[page] >= PAGE_BYTES:
                page += 1
            if page == len(full):
                full.append(0)
            kept[name] = page
            full[page] += sizes[name]
        while full and not full[-1]:
            full.pop()
        self._page_of = kept
        return len(full)


def encode_fact(fact: object) -> bytes:
    """Encode a fact in at most PAGE_ENTRY_BYTES.

    A larger mapping is cut to the entries that fit; any other value is replaced by a note of its size.
    """
    try:
        data = _encode(fact)
    except Exception as error:
        return _encode({"error": f"it cannot be encoded: {error!r}"[:TEXT_CHARS]})
    if len(data) <= PAGE_ENTRY_BYTES:
        return data
    note = f"cut: size_bytes={len(data)} limit_bytes={PAGE_ENTRY_BYTES}"
    if not isinstance(fact, dict):
        return _encode(note)
    left = PAGE_ENTRY_BYTES - len(note) - 64
    small: dict[object, object] = {}
    for key, value in fact.items():
        size = len(_encode(key)) + len(_encode(value))
        if size <= left:
            left -= size
            small[key] = value
    return _encode({**small, "cut": f"{note} entries={len(fact)} shown={len(small)}"})


def join_report(head: bytes, pages: Iterable[bytes]) -> StatusReport:
    """Return the report that `Pager.split` split. An entry that was on two pages for a moment appears once.

    Raises msgspec.MsgspecError, and ValueError if a page is missing, so that an incomplete report never passes for
    health.
    """
    found = _decode_head(head)
    marks: dict[str, StageStatus] = {}
    facts: dict[str, object] = {}
    known = list(pages)
    if len(known) < found.pages:
        raise ValueError(f"pages of a report are missing: pages={found.pages} found={len(known)}")
    for data in known[: found.pages]:
        page = _decode_page(data)
        marks.update((mark.name, mark) for mark in page.marks)
        facts |= page.facts
    return msgspec.structs.replace(found.report, marks=tuple(marks.values()), facts=facts)


def decode_report_head(head: bytes) -> StatusReport:
    """Return the report without its statuses and facts. Raises msgspec.MsgspecError."""
    return _decode_head(head).report


def _truncate_status(mark: StageStatus) -> StageStatus:
    if max(len(mark.name), len(mark.held_by), len(mark.upstream)) <= NAME_CHARS and (
        len(mark.reason) <= TEXT_CHARS and len(mark.error) <= TEXT_CHARS
    ):
        return mark
    return msgspec.structs.replace(
        mark,
        name=mark.name[:NAME_CHARS],
        held_by=mark.held_by[:NAME_CHARS],
        upstream=mark.upstream[:NAME_CHARS],
        reason=mark.reason[:TEXT_CHARS],
        error=mark.error[:TEXT_CHARS],
    )
