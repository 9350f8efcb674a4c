"""`tidemill restore` and `tidemill doctor --deep` as commands: their output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

from support.metastore.checkpoint_world import command
from support.metastore.checkpoint_world import directory as directory


def test_a_lost_consensus_is_planned_restored_and_checked(directory: Path) -> None:
    early = command(directory, "restore", "--dry-run")
    assert early.returncode == 0, early
    assert "topic   clicks" in early.stdout and "REFUSED consensus is not empty" in early.stdout
    assert command(directory, "restore").returncode == 2
    for path in (directory / "data").glob("consensus.db*"):
        path.unlink()
    lost = command(directory, "doctor", "--deep")
    assert lost.returncode == 1 and "FAIL consensus → cluster " in lost.stdout and "tidemill restore" in lost.stdout
    refused = command(directory, "topic", "list")
    assert refused.returncode == 2 and "the bucket has one" in refused.stderr
    planned = command(directory, "restore", "--dry-run")
    assert planned.returncode == 0, planned
    said = " ".join(planned.stdout.split())
    for words in ("incarnation 1", "domain ", " s old", "topic clicks partitions 2", "table table", "total topics 1"):
        assert words in said, (words, planned.stdout)
    lines = command(directory, "restore", "--dry-run", "-o", "jsonl").stdout.splitlines()
    assert {(row["dry_run"], row["kind"]) for row in map(json.loads, lines)} >= {(True, "topic"), (True, "table")}
    done = command(directory, "restore")
    assert done.returncode == 0, done
    assert "incarnation 2; start it with: tidemill up" in done.stdout
    again = command(directory, "restore")
    assert again.returncode == 2 and "consensus is not empty" in again.stderr and "metastore/cluster" in again.stderr
    deep = command(directory, "doctor", "--deep", "--json")
    report = json.loads(deep.stdout.splitlines()[-1])
    assert (deep.returncode, report["clean"], report["incarnation"]) == (0, True, 2)


def test_a_broken_reference_is_one_line_and_exit_1(directory: Path) -> None:
    [broken, *_] = sorted((directory / "data" / "objects" / "l0").rglob("*-*"))
    broken.unlink()
    deep = command(directory, "doctor", "--deep")
    assert deep.returncode == 1
    [line] = [line for line in deep.stdout.splitlines() if line.startswith("FAIL ")]
    assert broken.name in line and "the object is missing. Restore the object" in line
    assert "1 findings" in deep.stdout
    for path in (directory / "data").glob("consensus.db*"):
        path.unlink()
    done = command(directory, "restore", "--json")
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and len(report["findings"]) == 1 and report["restored"]["partitions"] == 2


def test_a_damaged_object_of_the_metastore_is_one_line_and_exit_2(directory: Path) -> None:
    for path in (directory / "data").glob("consensus.db*"):
        path.unlink()
    [damaged] = (directory / "data" / "objects" / "metastore" / "cluster").iterdir()
    text = damaged.read_bytes()
    damaged.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    for options in ([], ["--dry-run"]):
        done = command(directory, "restore", *options)
        assert (done.returncode, done.stdout) == (2, ""), done
        said = done.stderr.splitlines()[-1]
        assert said.startswith("tidemill: the object is damaged") and damaged.name in said, done
    damaged.write_bytes(text)
    assert command(directory, "restore").returncode == 0


def test_without_any_cluster_both_say_so(tmp_path: Path) -> None:
    restore = command(tmp_path, "restore", "--from", str(tmp_path / "empty"))
    assert restore.returncode == 2 and "contains no cluster" in restore.stderr
    deep = command(tmp_path, "doctor", "--deep")
    assert deep.returncode == 2 and "there is no cluster" in deep.stderr
