"""`tidemill topic lost` on a cluster with nothing running."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.cli.context import OpenStores, open_stores
from tidemill.cli.main import app
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import SingleNodeAssignment


def command(config: Path, *arguments: str, answer: str = "") -> str:
    """Return the output of the command, or raise the error that it ended with."""
    done = CliRunner().invoke(app, ["topic", *arguments, "--config", str(config)], input=answer)
    if isinstance(done.exception, TidemillError):
        raise done.exception
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def listed(config: Path, *arguments: str) -> Any:
    return json.loads(command(config, "lost", "odd.name", *arguments, "--json").splitlines()[-1])


def produced(opened: OpenStores, count: int) -> None:
    async def produce() -> None:
        row = await opened.catalogue.create_topic("odd.name", 2)
        topics = LocalTopics(
            opened.consensus, opened.objects, opened.catalogue,
            clock=opened.clock, rand=opened.rand, assignment=SingleNodeAssignment("n", 0),
        )  # fmt: skip
        for number in range(count):
            data = bytearray(encode_batch([Record(None, b"%d" % number), Record(None, b"b")]))
            await asyncio.wait_for(topics.produce_nowait(row.topic_id, 1, data), 60)
        await topics.aclose()

    opened.portal.call(produce())


def test_lost_objects_are_listed_and_let_go_by_name(tmp_path: Path) -> None:
    config = tmp_path / "tidemill.toml"
    config.write_text(f'[node]\ndata = "{tmp_path}/data"\n')
    (tmp_path / "data").mkdir()
    with open_stores(config, create=True) as opened:
        produced(opened, 3)
    assert listed(config) == [] and "nothing" in command(config, "lost", "odd.name")
    files = sorted(path for path in (tmp_path / "data" / "objects" / "l0").rglob("*") if path.is_file())
    assert len(files) == 3
    for path in files[:2]:
        path.unlink()
    first, second = listed(config)
    assert (first["partition"], first["offset"], first["end"], first["batches"], first["let_go"]) == (1, 0, 2, 1, False)
    assert f"l0/{files[1].parent.name}/{files[1].name}" == second["object"]
    there = f"l0/{files[2].parent.name}/{files[2].name}"
    for wrong in (there, "l0/nothing", "", "../x"):
        with pytest.raises(InvalidError):
            command(config, "lost", "odd.name", "--accept-loss", second["object"], "--accept-loss", wrong)
    abandon = ("--accept-loss", second["object"])
    for form in ((), ("--json",), ("-o", "csv")):
        with pytest.raises(InvalidError, match=r"it was not confirmed: Abandon 1 lost object for good\? .*Add --yes\."):
            command(config, "lost", "odd.name", *abandon, *form)
    dry = listed(config, "--accept-loss", "all", "--dry-run")
    assert [(row["let_go"], row["dry_run"]) for row in dry] == [(True, True)] * 2
    with (
        mock.patch("tidemill.cli.context.is_terminal", return_value=True),
        pytest.raises(InvalidError, match="Answer y"),
    ):
        command(config, "lost", "odd.name", *abandon, answer="n\n")
    assert [row["let_go"] for row in listed(config)] == [False, False], "all of it or nothing"
    assert [row["let_go"] for row in listed(config, *abandon, "--yes")] == [False, True]
    assert [row["let_go"] for row in listed(config, "--accept-loss", "all", "--yes")] == [True, True]
    again = listed(config, "--accept-loss", first["object"])
    assert [row["let_go"] for row in again] == [True, True], "nothing is lost any more, so nothing is asked"
    with pytest.raises(MissingError):
        command(config, "lost", "no.such")
