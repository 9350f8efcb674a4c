"""Google Cloud Storage.

    gs://bucket/prefix

Options: endpoint, service_account (path of a key file), service_account_key (its JSON),
credentials=environment|instance|anonymous. Credentials not in the URL come from GOOGLE_SERVICE_ACCOUNT_KEY, or from the
file that GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT names; with `credentials=instance` the service
account of the machine or pod provides them. STORAGE_EMULATOR_HOST names an emulator, which gets no credentials,
as with `credentials=anonymous`.

Creates carry `x-goog-if-generation-match: 0`: generation 0 is an object that does not exist.
https://cloud.google.com/storage/docs/request-preconditions
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from obstore.store import GCSStore

from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError
from tidemill.objects.buckets.bucket import REQUEST_TIMEOUT_S, BucketObjects, client_options, no_retries
from tidemill.objects.buckets.errors import GOOGLE, StoreLocation
from tidemill.objects.buckets.urls import parse_bucket_url

if TYPE_CHECKING:
    from obstore.store import GCSConfig

_OPTIONS = frozenset({"endpoint", "service_account", "service_account_key", "credentials"})
_FILES = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT")
_NO_SIGNATURE = json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""})
"""Key of an emulator. The library's `skip_signature` does not cover writes."""


class GcsObjects(BucketObjects):
    """Object store in a bucket of Google Cloud Storage.

    `config`: obstore's configuration without the bucket.
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
        endpoint = str(config.get("base_url", ""))
        place = StoreLocation(bucket, endpoint, GOOGLE)
        try:
            store = GCSStore(
                bucket,
                config=cast("GCSConfig", config),
                client_options=client_options(endpoint, timeout_s),
                retry_config=no_retries(timeout_s),
            )
        except Exception as error:
            # The library reads key files here; its text may quote them.
            raise InvalidError(
                f"the service account's key is invalid, or given both as a file and as JSON: {place}.",
                fix=GOOGLE.credentials,
            ) from error
        super().__init__(store, place, prefix, rand)


def parse_gcs(url: str, env: Mapping[str, str]) -> tuple[str, str, dict[str, Any]]:
    """Parse a URL as (bucket, prefix, obstore configuration). Raises InvalidError."""
    parsed = parse_bucket_url(url, _OPTIONS)
    options = parsed.options
    config: dict[str, Any] = {}
    emulator = env.get("STORAGE_EMULATOR_HOST", "")
    if emulator and "://" not in emulator:
        emulator = f"http://{emulator}"
    if endpoint := parsed.endpoint(emulator):
        config["base_url"] = endpoint
    source = parsed.credentials(("environment", "instance", "anonymous"))
    if source == "anonymous" or (emulator and "endpoint" not in options):
        return parsed.bucket, parsed.prefix, {**config, "service_account_key": _NO_SIGNATURE}
    if source == "instance":
        return parsed.bucket, parsed.prefix, config
    given = options.get("service_account", "")
    if key := options.get("service_account_key") or ("" if given else env.get("GOOGLE_SERVICE_ACCOUNT_KEY")):
        config["service_account_key"] = key
    elif path := given or next((env[name] for name in _FILES if env.get(name)), ""):
        if not os.path.isfile(path):
            raise InvalidError(
                f"the key file of objects.url does not exist: file={path} objects.url={parsed.shown!r}.",
                fix="Correct GOOGLE_APPLICATION_CREDENTIALS, or the service_account of the URL.",
            )
        config["service_account" if given else "application_credentials"] = path
    else:
        raise parsed.no_credentials(
            "Set GOOGLE_APPLICATION_CREDENTIALS to a key file or GOOGLE_SERVICE_ACCOUNT_KEY to its JSON, or add "
            "credentials=instance for the machine's service account."
        )
    return parsed.bucket, parsed.prefix, config
