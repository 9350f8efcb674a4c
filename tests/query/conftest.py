"""Share one moto server in the folder. Each cluster has a separate bucket and stores even small parts as objects."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.objects.moto_access import start_server
from support.query.world import BACKENDS, World
from tidemill.query import table_read
from tidemill.shards import handle
from tidemill.shards.compaction import compaction
from tidemill.shards.read import hash_ranges, part_reader


@pytest.fixture(scope="session")
def new_bucket() -> Iterator[Callable[[], str]]:
    """Return a function that creates a bucket and returns its URL; the server starts at the first use."""

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    servers, numbers = [], itertools.count()

    def make() -> str:
        import boto3

        if not servers:
            servers.append(start_server())
        host, port = servers[0].get_host_and_port()
        endpoint, name = f"http://{host}:{port}", f"bucket-{next(numbers)}"
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=name)
        return f"s3://{name}/p?endpoint={endpoint}&region=us-east-1&access_key_id=test&secret_access_key=test"

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small limits: every part is an object read in pieces, every read is held, ranges have fifty rows, merges have
    two parts."""
    for writer in (handle, compaction):
        monkeypatch.setattr(writer, "INLINE_PART_BYTES", 0)
    monkeypatch.setattr(part_reader, "WHOLE_FETCH_BYTES", 0)
    monkeypatch.setattr(table_read, "HOLD_ABOVE_BYTES", 0)
    monkeypatch.setattr(hash_ranges, "RANGE_ROWS", 50)
    monkeypatch.setattr(compaction, "FAN_IN", 2)


@pytest.fixture(params=BACKENDS)
def everywhere(request: pytest.FixtureRequest, tmp_path: Path, small: None) -> Iterator[World]:
    new_bucket = request.getfixturevalue("new_bucket")
    with BACKENDS[request.param](tmp_path, new_bucket) as cluster:
        yield World(cluster)


@pytest.fixture
def world(tmp_path: Path, small: None) -> Iterator[World]:
    with BACKENDS["directory"](tmp_path, lambda: "") as cluster:
        yield World(cluster)
