"""Azure Blob Storage.

    az://container/prefix?account=NAME

Options: account, account_key, sas_token, tenant_id, client_id, client_secret, endpoint,
credentials=environment|instance. Missing ones come from AZURE_STORAGE_CONNECTION_STRING, or from
AZURE_STORAGE_ACCOUNT_NAME with one of: AZURE_STORAGE_ACCOUNT_KEY; AZURE_STORAGE_SAS_TOKEN; AZURE_TENANT_ID,
AZURE_CLIENT_ID and AZURE_CLIENT_SECRET; the same with AZURE_FEDERATED_TOKEN_FILE instead of a secret (workload
identity). With `credentials=instance` the managed identity of the machine provides them.

The account must not have a hierarchical namespace: its directories are listed as objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from obstore.store import AzureStore

from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError
from tidemill.objects.buckets.bucket import REQUEST_TIMEOUT_S, BucketObjects, client_options, no_retries
from tidemill.objects.buckets.errors import AZURE, StoreLocation
from tidemill.objects.buckets.urls import BucketUrl, parse_bucket_url

if TYPE_CHECKING:
    from obstore.store import AzureConfig

NONCE = "tidemill_nonce"
"""Azure requires names of metadata to be identifiers."""
_VARIABLES = {
    "account": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY"),
    "sas_token": ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
    "tenant_id": ("AZURE_TENANT_ID",),
    "client_id": ("AZURE_CLIENT_ID",),
    "client_secret": ("AZURE_CLIENT_SECRET",),
    "federated_token_file": ("AZURE_FEDERATED_TOKEN_FILE",),
    "endpoint": ("AZURE_STORAGE_ENDPOINT",),
}
_OPTIONS = frozenset(_VARIABLES.keys() - {"federated_token_file"} | {"credentials"})
_CONNECTION = {
    "AccountName": "account",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_token",
    "BlobEndpoint": "endpoint",
}


class AzureObjects(BucketObjects):
    """Object store in a container of Azure Blob Storage.

    `config`: obstore's configuration without the container.
    """

    def __init__(
        self,
        container: str,
        prefix: str,
        config: dict[str, Any],
        rand: Rand,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        endpoint = str(config.get("endpoint", ""))
        place = StoreLocation(container, endpoint, AZURE)
        try:
            store = AzureStore(
                container,
                config=cast("AzureConfig", config),
                client_options=client_options(endpoint, timeout_s),
                retry_config=no_retries(timeout_s),
            )
        except Exception as error:
            # The library decodes keys here; its text may quote them.
            raise InvalidError(f"the credentials are not well-formed: {place}.", fix=AZURE.credentials) from error
        super().__init__(store, place, prefix, rand, nonce_name=NONCE)


def parse_azure(url: str, env: Mapping[str, str]) -> tuple[str, str, dict[str, Any]]:
    """Parse a URL as (container, prefix, obstore configuration). Raises InvalidError."""
    parsed = parse_bucket_url(url, _OPTIONS)
    found = _connection_string(env.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    found |= {
        option: value
        for option, names in _VARIABLES.items()
        if (value := next((env[name] for name in names if env.get(name)), ""))
    }
    found |= {option: value for option, value in parsed.options.items() if value}
    account = found.get("account")
    if not account:
        raise InvalidError(
            f"objects.url names no storage account: objects.url={parsed.shown!r}.",
            fix="Add account=NAME to the URL, or set AZURE_STORAGE_ACCOUNT_NAME.",
        )
    config: dict[str, Any] = {"account_name": account}
    if endpoint := parsed.endpoint(found.get("endpoint")):
        config["endpoint"] = endpoint
    if parsed.credentials(("environment", "instance")) == "instance":
        return parsed.bucket, parsed.prefix, {**config, "credential_type": "managed_identity"}
    return parsed.bucket, parsed.prefix, config | _credentials(parsed, found)


def _credentials(parsed: BucketUrl, found: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of the configuration that has the credentials. Raises InvalidError if they are incomplete."""
    if key := found.get("account_key"):
        return {"account_key": key, "credential_type": "access_key"}
    if token := found.get("sas_token"):
        return {"sas_key": token.removeprefix("?"), "credential_type": "sas_token"}
    identity = {name: found[name] for name in ("tenant_id", "client_id") if name in found}
    if secret := found.get("client_secret"):
        identity |= {"client_secret": secret, "credential_type": "client_secret"}
    elif file := found.get("federated_token_file"):
        identity |= {"federated_token_file": file, "credential_type": "workload_identity"}
    else:
        raise parsed.no_credentials(AZURE.credentials)
    if missing := [_VARIABLES[name][0] for name in ("tenant_id", "client_id") if name not in identity]:
        raise parsed.no_credentials(f"Set {' and '.join(missing)}.")
    return identity


def _connection_string(text: str) -> dict[str, str]:
    """Parse the `Name=value;Name=value` of the portal; unknown names are ignored."""
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    return {_CONNECTION[name.strip()]: value for name, _, value in pairs if name.strip() in _CONNECTION and value}
