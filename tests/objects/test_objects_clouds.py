"""Google Cloud Storage and Azure: the contract on emulators, URLs, credentials, errors, and the doctor's probe."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError

from contracts.objects import ObjectsContract, OpenStore
from support.objects.azurite import ACCOUNT, KEY, azurite
from support.objects.gcs_server import gcs_server
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.objects import ObjectStore, open_objects
from tidemill.objects.buckets.azure import AzureObjects, parse_azure
from tidemill.objects.buckets.errors import AZURE, StoreLocation, translate_obstore_error
from tidemill.objects.buckets.gcs import GcsObjects, parse_gcs
from tidemill.objects.buckets.urls import redact
from tidemill.objects.probe import probe_url
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import Buffer, MisconfiguredError

Bucket = tuple[str, Callable[[], str]]


@pytest.fixture(scope="module")
def google() -> Iterator[Bucket]:
    with gcs_server() as server:
        yield server


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with azurite(tmp_path_factory.mktemp("azurite") / "log") as server:
        yield server


def google_url(server: Bucket) -> str:
    return f"gs://{server[1]()}/some/prefix?endpoint={server[0]}&credentials=anonymous"


def azure_url(server: Bucket) -> str:
    return f"az://{server[1]()}/some/prefix?endpoint={server[0]}&account={ACCOUNT}"


AZURE_ENV = {"AZURE_STORAGE_ACCOUNT_KEY": KEY}


class TestGcs(ObjectsContract):
    @pytest.fixture
    def open_store(self, google: Bucket) -> OpenStore:
        @asynccontextmanager
        async def opened() -> AsyncIterator[ObjectStore]:
            store = await open_objects(google_url(google), SystemClock(), Rand(), env={})
            yield store
            await store.aclose()

        return opened


@pytest.mark.node
class TestAzure(ObjectsContract):
    @pytest.fixture
    def open_store(self, azure: Bucket) -> OpenStore:
        @asynccontextmanager
        async def opened() -> AsyncIterator[ObjectStore]:
            store = await open_objects(azure_url(azure), SystemClock(), Rand(), env=AZURE_ENV)
            yield store
            await store.aclose()

        return opened


async def _loses_an_acknowledgement(
    kind: type[GcsObjects | AzureObjects], parsed: tuple[str, str, dict[str, Any]]
) -> None:
    class Loses(kind):  # type: ignore[misc,valid-type]
        lost = 0

        async def put_with_nonce(self, key: str, data: Buffer | Sequence[Buffer], nonce: str) -> None:
            await super().put_with_nonce(key, data, nonce)
            if not self.lost:
                self.lost += 1
                raise UnknownOutcomeError("scripted.")

    class NeverSends(kind):  # type: ignore[misc,valid-type]
        async def put_with_nonce(self, key: str, data: Buffer | Sequence[Buffer], nonce: str) -> None:
            raise UnknownOutcomeError("scripted.")

    ours = RetryingObjects(Loses(*parsed, Rand(1)), SystemClock(), Rand(2), store="cloud")
    await ours.put("k", b"equal bytes")
    other = RetryingObjects(NeverSends(*parsed, Rand(3)), SystemClock(), Rand(4), store="cloud")
    with pytest.raises(ConflictError):
        await other.put("k", b"equal bytes")


async def test_on_gcs_the_nonce_tells_our_object_from_an_equal_one(google: Bucket) -> None:
    await _loses_an_acknowledgement(GcsObjects, parse_gcs(google_url(google), {}))


@pytest.mark.node
async def test_on_azure_the_nonce_tells_our_object_from_an_equal_one(azure: Bucket) -> None:
    await _loses_an_acknowledgement(AzureObjects, parse_azure(azure_url(azure), AZURE_ENV))


async def _names_a_missing_bucket(url: str, env: dict[str, str]) -> None:
    with pytest.raises(InvalidError, match=r"bucket of objects.url does not exist.*nosuchbucket"):
        await open_objects(url, SystemClock(), Rand(), env=env)


async def test_a_missing_bucket_is_named_at_open(google: Bucket) -> None:
    await _names_a_missing_bucket(f"gs://nosuchbucket?endpoint={google[0]}&credentials=anonymous", {})


@pytest.mark.node
async def test_a_missing_container_or_a_wrong_key_is_named_at_open(azure: Bucket) -> None:
    await _names_a_missing_bucket(f"az://nosuchbucket?endpoint={azure[0]}&account={ACCOUNT}", AZURE_ENV)
    # Azurite answers a wrong signature with AuthorizationFailure, Azure with AuthenticationFailed.
    with pytest.raises(InvalidError, match="no permission") as raised:
        await open_objects(azure_url(azure), SystemClock(), Rand(), env={"AZURE_STORAGE_KEY": "d3Jvbmc="})
    assert "Storage Blob Data Contributor" in raised.value.fix


def test_errors_of_azure_are_translated_by_their_codes() -> None:
    place = StoreLocation("c", "", AZURE)

    def translated(status: int, code: str) -> TidemillError:
        text = f"Server returned non-2xx status code: {status} : <Error><Code>{code}</Code></Error>"
        return translate_obstore_error(GenericError(text), "put", "k", place, writes=True)

    refused = translated(403, "AuthenticationFailed")
    assert isinstance(refused, MisconfiguredError) and "AZURE_STORAGE_ACCOUNT_KEY" in refused.fix
    refused = translated(403, "AuthorizationPermissionMismatch")
    assert isinstance(refused, MisconfiguredError) and "role" in refused.fix
    busy = translated(503, "ServerBusy")
    assert isinstance(busy, UnavailableError) and "throttling" in str(busy) and "endpoint=azure" in str(busy)
    assert isinstance(translated(500, "InternalError"), UnknownOutcomeError)


async def test_an_unreachable_endpoint_is_unavailable() -> None:
    for url in ("gs://b?endpoint=http://127.0.0.1:1&credentials=anonymous", "az://b?endpoint=http://127.0.0.1:1/a"):
        env = AZURE_ENV | {"AZURE_STORAGE_ACCOUNT_NAME": "a"}
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await open_objects(url, SystemClock(), Rand(), env=env, retry_budget_s=0.01)


async def _doctor(url: str) -> None:
    checks = await probe_url(url, SystemClock(), Rand())
    assert [check.name for check in checks if not check.ok] == []
    assert len(checks) == 7


async def test_the_doctor_passes_gcs_and_finds_an_emulator_that_ignores_conditions(google: Bucket) -> None:
    await _doctor(google_url(google))
    with gcs_server(conditions=False) as careless:
        checks = await probe_url(google_url(careless), SystemClock(), Rand())
    failed = [check.name for check in checks if not check.ok]
    assert failed == ["objects conditional create", "objects racing creates"]


@pytest.mark.node
async def test_the_doctor_passes_azure(azure: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    await _doctor(azure_url(azure))


@pytest.mark.parametrize(
    ("url", "env", "words"),
    [
        ("gs://", {}, "no bucket"),
        ("gs://b?colour=red", {}, "colour"),
        ("gs://b?endpoint=ftp://x", {}, "http address"),
        ("gs://b?credentials=magic", {}, "credentials=magic"),
        ("gs://b", {}, "GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs://b", {"GOOGLE_APPLICATION_CREDENTIALS": "/no/such/file"}, "does not exist: file=/no/such/file"),
        ("gs://b", {"GOOGLE_SERVICE_ACCOUNT_KEY": "{}"}, "key is invalid"),
        ("az://", {}, "no bucket"),
        ("az://c?colour=red", {}, "colour"),
        ("az://c", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
        ("az://c?account=a", {}, "AZURE_STORAGE_ACCOUNT_KEY"),
        ("az://c?account=a", {"AZURE_CLIENT_SECRET": "s"}, "AZURE_TENANT_ID and AZURE_CLIENT_ID"),
        ("az://c?account=a&client_id=i", {"AZURE_FEDERATED_TOKEN_FILE": "f"}, "Set AZURE_TENANT_ID."),
        ("az://c?account=a&account_key=!", {}, "not well-formed"),
    ],
)
async def test_a_wrong_url_is_refused_with_its_fix(url: str, env: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidError) as raised:
        await open_objects(url, SystemClock(), Rand(), env=env)
    assert words in f"{raised.value} {raised.value.fix}" and raised.value.fix


def test_credentials_of_google_come_from_the_url_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text("{}")
    env = {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    assert parse_gcs("gs://b/p/", env) == ("b", "p/", {"application_credentials": str(file)})
    assert parse_gcs(f"gs://b?service_account={file}", {"GOOGLE_SERVICE_ACCOUNT_KEY": "k"})[2] == {
        "service_account": str(file)
    }
    assert parse_gcs("gs://b?service_account_key=u", env)[2] == {"service_account_key": "u"}
    assert parse_gcs("gs://b?credentials=instance", env)[2] == {}
    emulated = parse_gcs("gs://b", {"STORAGE_EMULATOR_HOST": "localhost:4443"} | env)[2]
    assert (
        emulated["base_url"] == "http://localhost:4443" and '"disable_oauth": true' in emulated["service_account_key"]
    )


def test_credentials_of_azure_come_from_the_url_the_variables_and_the_connection_string() -> None:
    text = f"DefaultEndpointsProtocol=http;AccountName=a;AccountKey={KEY};BlobEndpoint=http://h:1/a;"
    env = {"AZURE_STORAGE_CONNECTION_STRING": text}
    key = {"account_name": "a", "account_key": KEY, "credential_type": "access_key", "endpoint": "http://h:1/a"}
    assert parse_azure("az://c/p", env) == ("c", "p/", key)
    assert parse_azure("az://c?account=other", env)[2]["account_name"] == "other"
    token = parse_azure("az://c?account=a", {"AZURE_STORAGE_SAS_TOKEN": "?sig=x"})[2]
    assert token == {"account_name": "a", "sas_key": "sig=x", "credential_type": "sas_token"}
    ids = {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "i"}
    by_file = parse_azure("az://c?account=a", ids | {"AZURE_FEDERATED_TOKEN_FILE": "/f"})[2]
    assert by_file["federated_token_file"] == "/f" and by_file["credential_type"] == "workload_identity"
    by_secret = parse_azure("az://c?account=a", ids | {"AZURE_CLIENT_SECRET": "s"})[2]
    assert by_secret["client_secret"] == "s" and by_secret["credential_type"] == "client_secret"
    managed = parse_azure("az://c?account=a&credentials=instance", env)[2]
    assert managed["credential_type"] == "managed_identity" and "account_key" not in managed


def test_secrets_never_reach_a_message() -> None:
    url = "az://c?account=a&account_key=hush&sas_token=hush&client_secret=hush&bad=1"
    assert "hush" not in redact(url) and "account=a&account_key=***" in redact(url)
    for secret in (url, f"gs://b?service_account_key={json.dumps({'private_key': 'hush'})}"):
        with pytest.raises(InvalidError) as raised:
            asyncio.run(open_objects(secret, SystemClock(), Rand(), env={}))
        assert "hush" not in f"{raised.value} {raised.value.fix}"
