"""Amazon S3 and every server with its API.

    s3://bucket/prefix?endpoint=http://host:port&region=us-east-1

Options: endpoint, region, access_key_id, secret_access_key, session_token, virtual_host=true|false,
credentials=environment|instance. Credentials not in the URL come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and
AWS_SESSION_TOKEN; with `credentials=instance` the role of the machine or container provides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from obstore.store import S3Store

from tidemill.base.clock import Rand
from tidemill.objects.buckets.bucket import REQUEST_TIMEOUT_S, BucketObjects, client_options, no_retries
from tidemill.objects.buckets.errors import AWS, StoreLocation
from tidemill.objects.buckets.urls import parse_bucket_url

if TYPE_CHECKING:
    from obstore.store import S3Config

_SECRETS = ("access_key_id", "secret_access_key", "session_token")
_OPTIONS = frozenset({*_SECRETS, "endpoint", "region", "virtual_host", "credentials"})


class S3Objects(BucketObjects):
    """Object store in an S3 bucket.

    `config`: obstore's S3 configuration without the bucket.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        config: dict[str, Any],
        rand: Rand,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        endpoint = str(config.get("endpoint", ""))
        store = S3Store(
            bucket,
            config=cast("S3Config", {"disable_bulk_delete": True, **config}),
            client_options=client_options(endpoint, timeout_s),
            retry_config=no_retries(timeout_s),
        )
        super().__init__(store, StoreLocation(bucket, endpoint, AWS), prefix, rand)


def parse_s3(url: str, env: Mapping[str, str]) -> tuple[str, str, dict[str, Any]]:
    """Parse a URL as (bucket, prefix, obstore configuration). Raises InvalidError."""
    parsed = parse_bucket_url(url, _OPTIONS)
    options = parsed.options
    config: dict[str, Any] = {
        "region": options.get("region") or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1",
        "virtual_hosted_style_request": options.get("virtual_host", "false").lower() == "true",
    }
    if endpoint := parsed.endpoint(env.get("AWS_ENDPOINT_URL_S3"), env.get("AWS_ENDPOINT_URL")):
        config["endpoint"] = endpoint
    if parsed.credentials(("environment", "instance")) == "instance":
        return parsed.bucket, parsed.prefix, config
    for name in _SECRETS:
        if value := options.get(name) or env.get(f"AWS_{name.upper()}"):
            config[name] = value
    if missing := [f"AWS_{name.upper()}" for name in _SECRETS[:2] if name not in config]:
        raise parsed.no_credentials(
            f"Set {' and '.join(missing)}, or add credentials=instance for the machine's role.",
        )
    return parsed.bucket, parsed.prefix, config
