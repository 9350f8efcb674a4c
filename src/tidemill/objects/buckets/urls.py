"""The parts that URLs of all buckets share: scheme://bucket/prefix?option=value."""

from __future__ import annotations

from collections.abc import Set
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from tidemill.base.address import without_credentials
from tidemill.base.errors import InvalidError
from tidemill.objects.store import check_prefix

URL_FIX = (
    "Write it as file:///dir, memory:, s3://bucket/prefix?endpoint=…&region=…, gs://bucket/prefix or "
    "az://container/prefix?account=…."
)
SECRETS = frozenset(
    {
        "access_key_id",
        "secret_access_key",
        "session_token",
        "service_account_key",
        "account_key",
        "sas_token",
        "client_secret",
    }
)
"""Options that never appear in a message or log."""


class BucketUrl(msgspec.Struct, frozen=True):
    """A parsed URL: `prefix` is empty or ends with '/', `shown` has no secrets."""

    bucket: str
    prefix: str
    options: dict[str, str]
    shown: str

    def endpoint(self, *fallbacks: str | None) -> str:
        """Return the endpoint of the URL, or the first fallback that is set, or "". Raises InvalidError."""
        endpoint = next((found for found in (self.options.get("endpoint"), *fallbacks) if found), "")
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise InvalidError(
                f"the endpoint of objects.url is not an http address: endpoint={without_credentials(endpoint)!r}.",
                fix="Write it as http://host:port or https://host.",
            )
        return endpoint.rstrip("/")

    def credentials(self, allowed: tuple[str, ...]) -> str:
        """Return the source of credentials, by default the environment. Raises InvalidError."""
        source = self.options.get("credentials", "environment")
        if source not in allowed:
            raise InvalidError(
                f"objects.url has an unknown source of credentials: credentials={source} objects.url={self.shown!r}.",
                fix=f"Use one of {', '.join(allowed)}.",
            )
        return source

    def no_credentials(self, fix: str) -> InvalidError:
        return InvalidError(f"no credentials for objects.url: objects.url={self.shown!r}.", fix=fix)


def parse_bucket_url(url: str, known: Set[str]) -> BucketUrl:
    """Parse a URL whose options are `known`. Raises InvalidError."""
    parts = urlsplit(url)
    shown = redact(url)
    if not parts.netloc:
        raise InvalidError(f"objects.url names no bucket: objects.url={shown!r}.", fix=URL_FIX)
    if without_credentials(url) != url:
        raise InvalidError(
            f"objects.url has credentials in front of the bucket: objects.url={shown!r}.",
            fix="Set them in the environment, or as parameters of the URL.",
        )
    prefix = unquote(parts.path).strip("/")
    if prefix:
        check_prefix(prefix)
        prefix += "/"
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - known):
        raise InvalidError(
            f"objects.url has unknown parameters: parameters={','.join(unknown)} objects.url={shown!r}.",
            fix=f"Use only {', '.join(sorted(known))}.",
        )
    return BucketUrl(parts.netloc, prefix, options, shown)


def redact(url: str) -> str:
    """Return the URL without its secrets, for messages and logs."""
    head, mark, query = without_credentials(url).partition("?")
    pairs = [part.partition("=") for part in query.split("&")] if mark else []
    return head + mark + "&".join(f"{n}={'***' if n in SECRETS else without_credentials(v)}" for n, _, v in pairs)
