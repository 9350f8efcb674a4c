"""Translate obstore's exceptions: whether the call happened, may be retried, and how to fix it.

obstore reports HTTP failures as `GenericError` (or `PermissionDeniedError`) with the status in the text only, so the
text is parsed here and nowhere else. A write failure that cannot be classified counts as "may have happened".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from obstore import exceptions as foreign

from tidemill.base.address import without_credentials
from tidemill.base.errors import (
    ConflictError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.objects.store import MisconfiguredError

# Anchored on text that the library and the server themselves print: keys and endpoints also occur in it.
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_CONNECT_FAILED = re.compile(r"^\s*kind: Connect,$", re.M)
_CREDENTIALS_SOURCE = re.compile(
    r"AssumeRole|web identity|instance metadata|CredentialsProvider|/latest/meta-data"
    r"|token request|metadata/identity/oauth2|computeMetadata|/oauth2/(?:v2\.0/)?token|oauth2\.googleapis\.com",
    re.I,
)
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}

_BAD_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "AuthorizationHeaderMalformed",
    "AuthenticationFailed",
    "NoAuthenticationInformation",
    "InvalidAuthenticationInfo",
    "InvalidSecurity",
}
_NO_PERMISSION = {"AuthorizationFailure", "AuthorizationPermissionMismatch", "InsufficientAccountPermissions"}
_TRANSIENT_CODES = {"RequestTimeout", "OperationAborted", "ServiceUnavailable", "BadDigest"}
"""Error codes of 4xx answers that another attempt may not get."""

_GATEWAY_FIX = "Check the gateway in front of the object store: it must forward conditional creates (If-None-Match)."

_THROTTLED = {
    "SlowDown",
    "TooManyRequests",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "ServerBusy",
}


@dataclass(frozen=True)
class Service:
    """The words of a cloud: its name as an endpoint, and the remedies for its credentials and permissions."""

    name: str
    credentials: str
    permissions: str


AWS = Service(
    "aws",
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if temporary) to valid ones.",
    "Grant s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on the bucket of objects.url.",
)
GOOGLE = Service(
    "google",
    "Set GOOGLE_APPLICATION_CREDENTIALS to the key file of a valid service account, or GOOGLE_SERVICE_ACCOUNT_KEY to "
    "its JSON.",
    "Grant roles/storage.objectUser on the bucket of objects.url.",
)
AZURE = Service(
    "azure",
    "Set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or AZURE_TENANT_ID, AZURE_CLIENT_ID and "
    "AZURE_CLIENT_SECRET, to valid ones, or add credentials=instance for the machine's identity.",
    "Assign the role Storage Blob Data Contributor on the container of objects.url.",
)


@dataclass(frozen=True)
class StoreLocation:
    """The store that an error is about, for its message."""

    bucket: str
    endpoint: str
    service: Service = AWS

    def __str__(self) -> str:
        return f"bucket={self.bucket} endpoint={without_credentials(self.endpoint) or self.service.name}"


def translate_obstore_error(
    error: Exception, operation: str, key: str, place: StoreLocation, *, writes: bool
) -> TidemillError:
    """Translate an exception.

    `writes`: the call could have changed the store, so an unclear failure is UnknownOutcomeError.
    """
    text = str(error)
    found = _STATUS.search(text)
    status = int(found.group(1)) if found else 0
    found = _CODE.search(text)
    code = found.group(1) if found else ""
    where = f"operation={operation} key={key} {place}"
    detail = f"{where} status={status} code={code or 'none'}"
    if code in _NO_BUCKET:
        return MisconfiguredError(
            f"the bucket of objects.url does not exist: {where}.", fix="Create it, or correct objects.url."
        )
    if isinstance(error, FileNotFoundError):
        if operation == "put":
            return UnknownOutcomeError(
                f"the object store answered a create with 'not found': {detail}.", fix=_GATEWAY_FIX
            )
        return MissingError(f"no such object: {where}.")
    if isinstance(error, foreign.AlreadyExistsError | foreign.PreconditionError | foreign.NotModifiedError):
        return ConflictError(f"the object already exists: {detail}.")
    if isinstance(error, foreign.UnauthenticatedError) or code in _BAD_CREDENTIALS or _CREDENTIALS_SOURCE.search(text):
        return MisconfiguredError(
            f"the object store does not accept the credentials: {detail}.",
            fix=place.service.credentials,
        )
    if isinstance(error, foreign.PermissionDeniedError) or code in _NO_PERMISSION:
        return MisconfiguredError(
            f"the credentials have no permission for this operation in the bucket: {detail}.",
            fix=place.service.permissions,
        )
    if isinstance(error, foreign.NotSupportedError | NotImplementedError | foreign.InvalidPathError | ValueError):
        return InvalidError(f"the object store rejected the request: {detail} reason={_first_line(text)!r}.")
    if _CONNECT_FAILED.search(text):
        return UnavailableError(
            f"the object store cannot be reached: {where}.",
            fix="Check that the endpoint of objects.url is right and up.",
        )
    if status == 429 or (status == 503 and code in _THROTTLED):
        return UnavailableError(f"the object store is throttling: {detail}.", fix="Lower the request rate or wait.")
    if 400 <= status < 500 and status not in (408, 409) and code not in _TRANSIENT_CODES:
        return InvalidError(f"the object store rejected the request: {detail} reason={_first_line(text)!r}.")
    if writes:
        return UnknownOutcomeError(
            f"the object store failed or did not answer a write: {detail} reason={_first_line(text)!r}."
        )
    return UnavailableError(f"the object store failed or did not answer: {detail} reason={_first_line(text)!r}.")


def translate_rejected_create(said: TidemillError) -> TidemillError:
    """Translate a rejected create although the object does not exist.

    `said`: the error of the rejection, with its status.

    S3 answers 409 while another create of the key is undecided: then this one certainly did not happen. Any other
    answer is not reliable.
    """
    detail = said.message.partition(": ")[2]
    if "status=409 " in detail:
        return UnavailableError(f"another create of the object is in progress: {detail}")
    return UnknownOutcomeError(f"the object store rejected a create of a missing object: {detail}", fix=_GATEWAY_FIX)


def _first_line(text: str, limit: int = 300) -> str:
    return " ".join(text.partition("Debug source:")[0].split())[:limit]
