"""Prints a line of JSON for each row of the table `probe` that a reader outside the stack sees: {"id": …, "at_s": …}.

    python versus_reader.py tidemill CONFIG        python versus_reader.py delta|iceberg DIRECTORY

tidemill is read by `changes(follow=True)`. A Delta or Iceberg table is read by polling for its next version every 20
ms, and then only the files that the version added.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import fastavro
import pyarrow.parquet as pq

import paths  # noqa: F401

POLL_S = 0.02


def ids_of(files: Iterable[str]) -> list[int]:
    return [each for file in files for each in pq.read_table(file, columns=["id"]).column("id").to_pylist()]


def follow_tidemill(config: str) -> Iterator[list[int]]:
    import tidemill
    from tidemill.base.errors import InvalidError, MissingError, UnavailableError

    while True:
        try:
            with tidemill.connect(config) as cluster:
                table = cluster.table("probe")
                for updates in table.changes(since=table.frontiers().since, follow=True):
                    yield updates.column("id").to_pylist()
        except (InvalidError, MissingError, UnavailableError):
            time.sleep(POLL_S)  # the cluster or its table does not exist yet


def added_by_delta(version: Path, table: Path) -> list[str]:
    """Return the data files that one version of a Delta table added."""
    actions = map(json.loads, version.read_text().splitlines())
    added = [action["add"] for action in actions if "add" in action]
    return [str(table / add["path"]) for add in added if add["dataChange"]]


def follow_delta(table: Path) -> Iterator[list[int]]:
    number = 0
    while True:
        version = table / "_delta_log" / f"{number:020d}.json"
        if version.exists():
            yield ids_of(added_by_delta(version, table))
            number += 1
        else:
            time.sleep(POLL_S)


def added_by_iceberg(metadata: Path) -> list[str]:
    """Return the data files that the current snapshot of a version of an Iceberg table added."""
    found = json.loads(metadata.read_text())
    snapshot = next((one for one in found["snapshots"] if one["snapshot-id"] == found["current-snapshot-id"]), None)
    files = []
    for manifest in _avro(snapshot["manifest-list"]) if snapshot else ():
        if manifest["added_snapshot_id"] == snapshot["snapshot-id"] and manifest["content"] == 0:
            entries = _avro(manifest["manifest_path"])
            files += [entry["data_file"]["file_path"] for entry in entries if entry["status"] == 1]
    return [file.removeprefix("file:") for file in files]


def _avro(path: str) -> list[dict[str, object]]:
    with open(path.removeprefix("file:"), "rb") as file:
        return list(fastavro.reader(file))


def follow_iceberg(table: Path) -> Iterator[list[int]]:
    number = 1
    while True:
        version = table / "metadata" / f"v{number}.metadata.json"
        if version.exists():
            yield ids_of(added_by_iceberg(version))
            number += 1
        else:
            time.sleep(POLL_S)


def main() -> None:
    kind, place = sys.argv[1:]
    if kind == "tidemill":
        found = follow_tidemill(place)
    elif kind == "delta":
        found = follow_delta(Path(place) / "tables" / "probe")
    else:
        found = follow_iceberg(Path(place) / "tables" / "shop" / "probe")
    for ids in found:
        at_s = time.time()
        for each in ids:
            print(json.dumps({"id": each, "at_s": at_s}), flush=True)


if __name__ == "__main__":
    main()
