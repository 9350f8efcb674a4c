"""Open the store of the `objects.url` setting, or raise an error with one sentence about what is wrong with it.

    file:///abs/dir, ./dir, /abs/dir      a local directory
    memory:                               this process only
    s3://bucket/prefix                    Amazon S3 and servers with its API: `buckets.s3`
    gs://bucket/prefix                    Google Cloud Storage: `buckets.gcs`
    az://container/prefix?account=NAME    Azure Blob Storage: `buckets.azure`

Options and environment variables of a bucket are in its module.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import InvalidError
from tidemill.base.limits import OBJECT_RETRY_BUDGET_S
from tidemill.objects.buckets.urls import URL_FIX, redact
from tidemill.objects.local import LocalObjects
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectStore

BUCKET_SCHEMES = ("s3", "gs", "az")


async def open_objects(
    url: str,
    clock: Clock,
    rand: Rand,
    *,
    env: Mapping[str, str] | None = None,
    retry_budget_s: float = OBJECT_RETRY_BUDGET_S,
    verify: bool = True,
    create: bool = True,
) -> RetryingObjects:
    """Open the store of `url`, with retries and metrics.

    `verify` lists one key of a bucket, so that a wrong name, permission or endpoint is detected now. Without `create` a
    local directory that is not a store yet is unavailable: its file system may not be mounted. A process that knows the
    cluster's consensus opens the bucket with `metastore.factory.open_bucket` instead. Raises
    InvalidError (names objects.url; the operator must act) and UnavailableError (wait and retry:
    `base.runtime.tasks.open_with_retry`). Once open, missing permissions or credentials are also UnavailableError,
    because they were valid before.
    """
    scheme = _scheme(url)

    inner: ObjectStore
    if scheme == "memory":
        inner = MemoryObjects(clock)
    elif scheme == "file":
        inner = await asyncio.to_thread(LocalObjects.open, _directory(url), clock, rand, create=create)
    else:
        inner = _bucket(scheme, url, os.environ if env is None else env, rand)
        if verify:
            async for _ in inner.list(""):
                break
    label = {"file": "local"}.get(scheme, scheme)
    return RetryingObjects(
        inner,
        clock,
        rand,
        store=label,
        budget_s=retry_budget_s,
        coalesce=scheme in BUCKET_SCHEMES,
    )


def _bucket(scheme: str, url: str, env: Mapping[str, str], rand: Rand) -> ObjectStore:
    """Return the store of a bucket; its module, and with it the library, is imported on demand."""
    if scheme == "gs":
        from tidemill.objects.buckets.gcs import GcsObjects, parse_gcs

        return GcsObjects(*parse_gcs(url, env), rand)
    if scheme == "az":
        from tidemill.objects.buckets.azure import AzureObjects, parse_azure

        return AzureObjects(*parse_azure(url, env), rand)
    from tidemill.objects.buckets.s3 import S3Objects, parse_s3

    return S3Objects(*parse_s3(url, env), rand)


def _scheme(url: str) -> str:
    head, colon, _ = url.partition(":")
    if not url.strip():
        raise InvalidError("objects.url is empty.", fix=URL_FIX)
    if not colon or "/" in head:
        return "file"
    if head in ("file", "memory", *BUCKET_SCHEMES):
        return head
    raise InvalidError(f"objects.url has an unknown scheme: objects.url={redact(url)!r}.", fix=URL_FIX)


def local_directory(url: str) -> str | None:
    """Return the absolute directory of a local store, or None for another store.

    Raises InvalidError for an unknown scheme.
    """
    return os.path.abspath(_directory(url)) if _scheme(url) == "file" else None


def _directory(url: str) -> str:
    if not url.startswith("file:"):
        return os.path.expanduser(url)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidError(
            f"a file URL needs an absolute path: objects.url={redact(url)!r}.",
            fix="Write three slashes: file:///dir.",
        )
    if "?" in url or "#" in url:
        raise InvalidError(
            f"a file URL has neither parameters nor a fragment: objects.url={redact(url)!r}.",
            fix="Write ? as %3F and # as %23, or write the directory alone, without file://.",
        )
    return unquote(parts.path, errors="surrogateescape")  # as os.fsdecode: not every name is UTF-8
