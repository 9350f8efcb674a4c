"""A cluster in a directory with one table, for commands that read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from typer.testing import CliRunner

from tidemill.base.errors import TidemillError
from tidemill.cli.context import open_stores
from tidemill.cli.main import app
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.registry import open_shard

SCHEMA = ShardSchema((Column("k", "int32"), Column("v", "string")), ("k",))

DAY = 1_700_000_000_000


def create_stores(config: Path) -> None:
    """Create the stores of a configuration, as its first node does."""
    with open_stores(config, create=True):
        pass


class Cluster:
    group = "table"
    """Group of commands."""

    def __init__(self, directory: Path) -> None:
        self.config = directory / "tidemill.toml"
        self.config.write_text(f'[node]\ndata = "{directory}/data"\n')
        (directory / "data").mkdir()
        create_stores(self.config)

    @classmethod
    def of(cls, config: Path) -> Cluster:
        """Return the cluster of a configuration, which exists."""
        found = cls.__new__(cls)
        found.config = config
        return found

    def command(self, *arguments: str, answer: str = "") -> str:
        """Return the output of the command. Raise the error with which it refused."""
        with mock.patch("tidemill.cli.context.is_terminal", return_value=bool(answer)):
            done = CliRunner().invoke(app, [self.group, *arguments, "--config", str(self.config)], input=answer)
        if isinstance(done.exception, TidemillError):
            raise done.exception
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.command(*arguments, "--json").splitlines()[-1])

    def append(self, *batches: list[tuple[int, str, int]], name: str = "orders", token: str = "") -> None:
        """One append a batch, each a second: key, value, diff."""
        with open_stores(self.config, create=True) as opened:

            async def run() -> None:
                shard = await open_shard(opened.consensus, opened.objects, opened.clock, opened.rand, name, SCHEMA)
                shard.writer = "w1"
                _, lower = await shard.frontiers()
                for rows in batches:
                    upper = max(lower, DAY) + 1000
                    k, v, diffs = zip(*rows, strict=True)
                    table = pa.table(
                        {"k": pa.array(k, pa.int32()), "v": list(v), TIME: [upper - 1] * len(rows), DIFF: list(diffs)}
                    )
                    await shard.compare_and_append(lower, upper, [await shard.write_part(table)], token)
                    lower = upper
                await shard.aclose()

            opened.portal.call(run())

    def topic(self, name: str, partitions: int) -> None:
        with open_stores(self.config, create=True) as opened:
            opened.portal.call(opened.catalogue.create_topic(name, partitions))

    def pipeline(self, row: PipelineRow) -> None:
        with open_stores(self.config, create=True) as opened:
            opened.portal.call(opened.catalogue.put(row))
