"""Share one moto server among the folder's S3 tests, each of which uses a separate bucket."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator

import pytest

from support.objects.moto_access import start_server


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = start_server()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def new_bucket(s3_endpoint: str) -> Callable[[], str]:
    """Return a function that creates a bucket and returns its name."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    numbers = itertools.count()

    def make() -> str:
        name = f"bucket-{next(numbers)}"
        client.create_bucket(Bucket=name)
        return name

    return make
