"""Faults of every store under a small load, one after another. `/readyz`, `why` and `status` report each under its own
name, within the promised time.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from support.faults.faulty_stores import FaultyPostgres, FaultyS3
from support.faults.served import PROMISED_S, Served, World, running
from support.objects.moto_access import start_server
from support.replication_slots import drop_slots
from support.waiting import slowness
from tidemill.objects import durable_create
from tidemill.objects.durable_create import RealSyscalls


@dataclass
class Remote:
    """A node over S3 and two PostgreSQL databases, each behind a proxy."""

    world: World
    served: Served
    s3: FaultyS3
    consensus: FaultyPostgres
    captured: FaultyPostgres


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory, postgres_server: Any) -> Iterator[Remote]:
    import boto3

    directory = tmp_path_factory.mktemp("remote")
    with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
        connection.execute("CREATE DATABASE faults_consensus")
        connection.execute("CREATE DATABASE faults_captured")
    with psycopg.connect(postgres_server.dsn_for("faults_captured"), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id serial PRIMARY KEY)")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = start_server()
    host, port = moto.get_host_and_port()
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", **keys).create_bucket(
        Bucket="faults"
    )
    world = World()

    async def proxies() -> tuple[FaultyS3, FaultyPostgres, FaultyPostgres]:
        return (
            await FaultyS3(f"http://{host}:{port}").__aenter__(),
            await FaultyPostgres(postgres_server.dsn_for("faults_consensus")).__aenter__(),
            await FaultyPostgres(postgres_server.dsn_for("faults_captured")).__aenter__(),
        )

    s3, consensus, captured = world.run(proxies())
    served = Served(
        directory,
        {
            "objects": {"url": f"s3://faults?endpoint={s3.endpoint}&access_key_id=k&secret_access_key=s"},
            "consensus": {"url": consensus.dsn},
            "capture": {"shop": {"dsn": captured.dsn, "tables": ["public.t"]}},
            "topics": {"clicks": {"partitions": 1}},
        },
    )
    try:
        with running(served, world, postgres_server.dsn_for("faults_captured")):
            yield Remote(world, served, s3, consensus, captured)
    finally:
        for proxy in (s3, consensus, captured):
            world.run(proxy.__aexit__())
        world.close()
        moto.stop()
        drop_slots(postgres_server.dsn_for("faults_captured"))  # other tests on this server capture under the same name


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A node over a directory and SQLite."""
    directory, world = tmp_path_factory.mktemp("local"), World()
    stores = {"objects": {"url": f"file://{directory}/objects"}, "consensus": {"url": f"sqlite://{directory}/c.db"}}
    served = Served(directory, {**stores, "topics": {"clicks": {"partitions": 1}}})
    try:
        with running(served, world):
            yield served
    finally:
        world.close()


@pytest.mark.parametrize(
    ("code", "inodes_left", "words"),
    [
        (errno.ENOSPC, 100, "found no space"),
        (errno.ENOSPC, 0, "found no free inode"),
        (errno.EMFILE, 100, "error=EMFILE"),
    ],
)
def test_f616_a_directory_that_takes_no_file_is_named_everywhere_in_time(
    local: Served, monkeypatch: pytest.MonkeyPatch, code: int, inodes_left: int, words: str
) -> None:
    def refuse(self: RealSyscalls, path: str) -> int:
        raise OSError(code, os.strerror(code), path)

    local.well()
    with monkeypatch.context() as broken:
        broken.setattr(RealSyscalls, "create", refuse)
        broken.setattr(durable_create, "_has_no_free_inodes", lambda root: not inodes_left)
        seen = local.reported("objects@node:n1", words, ready=503)
        local.answers_in_time()
    assert max(seen.values()) < PROMISED_S * slowness(), seen


@pytest.mark.parametrize(
    ("store", "fault", "mark", "words", "ready"),
    [
        ("s3", "500", "objects@node:n1", "status=500 code=InternalError", 503),
        ("s3", "503", "objects@node:n1", "status=503 code=SlowDown", 503),
        ("s3", "404", "objects@node:n1", "status=404 code=NoSuchKey", 503),
        ("s3", "hang", "objects@node:n1", "the object store does not answer", 503),
        ("consensus", "refused", "consensus@node:n1", "PostgreSQL", 503),
        ("consensus", "swallowed", "consensus@node:n1", "not answer", 503),
        ("consensus", "slow", "consensus@node:n1", "not answer", 503),
        ("captured", "refused", "capture:shop", "PostgreSQL", 200),
        ("captured", "swallowed", "capture:shop", "PostgreSQL does not answer", 200),
        ("captured", "slow", "capture:shop", "PostgreSQL does not answer", 200),
    ],
)
def test_f615_a_fault_of_a_store_under_load_is_named_everywhere_in_time(
    remote: Remote, store: str, fault: str, mark: str, words: str, ready: int
) -> None:
    named_in_time(remote, store, fault, mark, words, ready)


def test_f617_a_gateway_that_answers_412_after_its_own_success_is_a_notice_everywhere_in_time(remote: Remote) -> None:
    named_in_time(remote, "s3", "412", "objects@node:n1", "status=412", 200)


def named_in_time(remote: Remote, store: str, fault: str, mark: str, words: str, ready: int) -> None:
    served, proxy = remote.served, getattr(remote, store)
    served.well()
    remote.world.call(lambda: proxy.switch(fault))
    try:
        seen = served.reported(mark, words, ready=ready)
        served.answers_in_time()
    finally:
        remote.world.call(lambda: proxy.switch(""))
        remote.world.run(proxy.cut())
    assert max(seen.values()) < PROMISED_S * slowness(), seen
