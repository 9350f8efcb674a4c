"""Manifests of a snapshot that are listed again, and what the new manifest contains. Pure.

    kept       all of its files are still wanted, unchanged: listed again
    dissolved  some are not: the others become entries of the new manifest
    folded     FAN_IN kept manifests of a size class: they become one, so that a snapshot has few manifests

So the cost of a publication grows with the change, and with the logarithm of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidemill.lake.format.manifests import Entry, Manifest

FAN_IN = 8


class Group(msgspec.Struct, frozen=True):
    """A manifest with its entries: data files by path, or deletes by the path of their data file.

    `blobs` are the vectors of the deletes, for format 3; None if they were not read.
    """

    manifest: Manifest
    entries: Mapping[str, Entry]
    blobs: Mapping[str, bytes] | None = None


class Regrouped(msgspec.Struct, frozen=True):
    """`kept` are listed again. The new manifest has `moved` entries of other groups, and files for the paths `new`."""

    kept: tuple[Group, ...]
    moved: Mapping[str, Entry]
    new: tuple[str, ...]


def regroup_data(groups: Sequence[Group], wanted: Mapping[str, object]) -> Regrouped:
    """Regroup data files. A file never changes, so a known path is that file."""
    return _regroup(groups, wanted, {path for group in groups for path in group.entries} & wanted.keys())


def regroup_deletes(groups: Sequence[Group], wanted: Mapping[str, bytes]) -> Regrouped:
    """Regroup deletes. Those with the same vector as before are unchanged."""
    same = {
        path
        for group in groups
        for path in group.entries
        if group.blobs is not None and path in wanted and group.blobs.get(path) == wanted[path]
    }
    return _regroup(groups, wanted, same)


def _regroup(groups: Sequence[Group], wanted: Mapping[str, object], same: set[str]) -> Regrouped:
    kept = [group for group in groups if group.entries.keys() <= same]
    dissolved = [group for group in groups if not group.entries.keys() <= same]
    new = tuple(path for path in wanted if path not in same)
    if dissolved or new:
        folded = _foldable(kept)
        kept = [group for group in kept if group not in folded]
        dissolved += folded
    moved = {path: entry for group in dissolved for path, entry in group.entries.items() if path in same}
    return Regrouped(tuple(kept), moved, new)


def _foldable(groups: Sequence[Group]) -> list[Group]:
    """Return the groups up to the first size class that has FAN_IN of them with those below it, or none."""
    classes = [_size_class(len(group.entries)) for group in groups]
    for top in sorted(set(classes)):
        found = [group for group, size in zip(groups, classes, strict=True) if size <= top]
        if len(found) >= FAN_IN:
            return found
    return []


def _size_class(files: int) -> int:
    out, bound = 0, FAN_IN
    while files > bound:
        bound *= FAN_IN
        out += 1
    return out
