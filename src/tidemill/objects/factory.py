"""Open the store of the `objects.url` setting, or raise an error with one sentence about what is wrong with it.

    file:///abs/dir, ./dir, /abs/dir      a local directory
    memory:                               this process only
    s3://bucket/prefix?endpoint=http://host:port&region=us-east-1

Query keys of s3: endpoint, region, access_key_id, secret_access_key, session_token, virtual_host=true|false,
credentials=environment|instance. Credentials not in the query come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and
AWS_SESSION_TOKEN; with `credentials=instance` the role of the machine or container provides them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import InvalidError
from tidemill.base.limits import OBJECT_RETRY_BUDGET_S
from tidemill.objects.local import LocalObjects
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectStore, check_prefix

_URL_FIX = "Write it as file:///dir, memory: or s3://bucket/prefix?endpoint=…&region=…."
_SECRETS = {"access_key_id", "secret_access_key", "session_token"}
_QUERY_KEYS = _SECRETS | {"endpoint", "region", "virtual_host", "credentials"}


async def open_objects(
    url: str,
    clock: Clock,
    rand: Rand,
    *,
    env: Mapping[str, str] | None = None,
    retry_budget_s: float = OBJECT_RETRY_BUDGET_S,
    verify: bool = True,
) -> RetryingObjects:
    """Open the store of `url`, with retries and metrics.

    `verify` lists one key of a bucket, so that a wrong name, permission or endpoint is detected now. Raises
    InvalidError (names objects.url; the operator must act) and UnavailableError (wait and retry:
    `base.runtime.tasks.open_with_retry`). Once open, missing permissions or credentials are also UnavailableError,
    because they were valid before.
    """
    scheme = _scheme(url)

    inner: ObjectStore
    if scheme == "memory":
        inner = MemoryObjects(clock)
    elif scheme == "file":
        inner = await asyncio.to_thread(LocalObjects.open, _directory(url), clock, rand)
    else:
        from tidemill.objects.s3 import S3Objects

        bucket, prefix, config = parse_s3(url, os.environ if env is None else env)
        inner = S3Objects(bucket, prefix, config, rand)
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
        coalesce=scheme == "s3",
    )


def redact(url: str) -> str:
    """Return the URL without its secrets, for messages and logs."""
    head, mark, query = url.partition("?")
    pairs = [part.partition("=") for part in query.split("&")] if mark else []
    return head + mark + "&".join(f"{n}={'***' if n in _SECRETS else v}" for n, _, v in pairs)


def parse_s3(url: str, env: Mapping[str, str]) -> tuple[str, str, dict[str, Any]]:
    """Parse a URL as (bucket, prefix, obstore configuration). Raises InvalidError."""
    parts = urlsplit(url)
    shown = redact(url)
    if not parts.netloc:
        raise InvalidError(f"objects.url names no bucket: objects.url={shown!r}.", fix=_URL_FIX)
    prefix = unquote(parts.path).strip("/")
    if prefix:
        check_prefix(prefix)
        prefix += "/"
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(query.keys() - _QUERY_KEYS):
        raise InvalidError(
            f"objects.url has unknown parameters: parameters={','.join(unknown)} objects.url={shown!r}.",
            fix=f"Use only {', '.join(sorted(_QUERY_KEYS))}.",
        )
    config: dict[str, Any] = {
        "region": query.get("region") or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1",
        "virtual_hosted_style_request": query.get("virtual_host", "false").lower() == "true",
    }
    if endpoint := query.get("endpoint") or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL"):
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidError(
                f"the endpoint of objects.url is not an http address: endpoint={endpoint!r}.",
                fix="Write it as http://host:port or https://host.",
            )
        config["endpoint"] = endpoint.rstrip("/")
    if query.get("credentials", "environment") == "instance":
        return parts.netloc, prefix, config
    for name in ("access_key_id", "secret_access_key", "session_token"):
        if value := query.get(name) or env.get(f"AWS_{name.upper()}"):
            config[name] = value
    if "access_key_id" not in config or "secret_access_key" not in config:
        raise InvalidError(
            f"no credentials for objects.url: objects.url={shown!r}.",
            fix="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or add credentials=instance for the machine's role.",
        )
    return parts.netloc, prefix, config


def _scheme(url: str) -> str:
    head, colon, _ = url.partition(":")
    if not url.strip():
        raise InvalidError("objects.url is empty.", fix=_URL_FIX)
    if not colon or "/" in head:
        return "file"
    if head in ("file", "memory", "s3"):
        return head
    raise InvalidError(f"objects.url has an unknown scheme: objects.url={redact(url)!r}.", fix=_URL_FIX)


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
            f"a file URL needs an absolute path: objects.url={url!r}.", fix="Write three slashes: file:///dir."
        )
    return unquote(parts.path)
