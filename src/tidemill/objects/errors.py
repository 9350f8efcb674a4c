"""obstore's exceptions as ours: did it happen, may it be retried, what must the operator do.

obstore hands HTTP failures over as `GenericError` (or `PermissionDeniedError`) with the status in
the text only, so the text is read here and nowhere else. What cannot be classified counts as
"may have happened" for writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from obstore import exceptions as foreign

from tidemill.base.errors import (
    ConflictError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.objects.store import MisconfiguredError

# Anchored on what the library and the server print themselves: keys and endpoints also occur in the text.
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_NEVER_SENT = re.compile(r"^\s*kind: Connect,$", re.M)
_CREDENTIALS_SOURCE = re.compile(
    r"AssumeRole|web identity|instance metadata|CredentialsProvider|/latest/meta-data", re.I
)

_BAD_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "AuthorizationHeaderMalformed",
}
_PASSING = {"RequestTimeout", "OperationAborted", "ServiceUnavailable", "BadDigest"}
"""Answers of 400 and so on that another attempt may not meet."""

_GATEWAY = "Check the gateway in front of the object store: it must pass conditional creates (If-None-Match) on."

_THROTTLED = {"SlowDown", "TooManyRequests", "Throttling", "ThrottlingException", "RequestLimitExceeded"}


@dataclass(frozen=True)
class Place:
    """Which store an error is about, for its message."""

    bucket: str
    endpoint: str

    def __str__(self) -> str:
        return f"bucket={self.bucket} endpoint={self.endpoint or 'aws'}"


def translate(error: Exception, operation: str, key: str, place: Place, *, writes: bool) -> TidemillError:
    """`writes` = the call could have changed the store, so an unclear failure is Unknown, not Unavailable."""
    text = str(error)
    found = _STATUS.search(text)
    status = int(found.group(1)) if found else 0
    found = _CODE.search(text)
    code = found.group(1) if found else ""
    where = f"operation={operation} key={key} {place}"
    detail = f"{where} status={status} code={code or 'none'}"
    if code == "NoSuchBucket":
        return MisconfiguredError(
            f"The bucket of objects.url does not exist: {where}.", fix="Create it, or correct objects.url."
        )
    if isinstance(error, FileNotFoundError):
        if operation == "put":
            return UnknownOutcomeError(
                f"The object store answers a create as if something were missing: {detail}.", fix=_GATEWAY
            )
        return MissingError(f"No such object: {where}.")
    if isinstance(error, foreign.AlreadyExistsError | foreign.PreconditionError | foreign.NotModifiedError):
        return ConflictError(f"The object exists already: {detail}.")
    if isinstance(error, foreign.UnauthenticatedError) or code in _BAD_CREDENTIALS or _CREDENTIALS_SOURCE.search(text):
        return MisconfiguredError(
            f"The object store does not accept the credentials: {detail}.",
            fix="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if temporary) to valid ones.",
        )
    if isinstance(error, foreign.PermissionDeniedError):
        return MisconfiguredError(
            f"The credentials have no right to do this in the bucket: {detail}.",
            fix="Grant s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on the bucket of objects.url.",
        )
    if isinstance(error, foreign.NotSupportedError | NotImplementedError | foreign.InvalidPathError | ValueError):
        return InvalidError(f"The object store refuses the request: {detail} reason={_first_line(text)!r}.")
    if _NEVER_SENT.search(text):
        return UnavailableError(
            f"The object store cannot be reached: {where}.",
            fix="Check that the endpoint of objects.url is right and up.",
        )
    if status == 429 or (status == 503 and code in _THROTTLED):
        return UnavailableError(f"The object store is throttling: {detail}.", fix="Lower the request rate or wait.")
    if 400 <= status < 500 and status not in (408, 409) and code not in _PASSING:
        return InvalidError(f"The object store refuses the request: {detail} reason={_first_line(text)!r}.")
    if writes:
        return UnknownOutcomeError(
            f"The object store failed or did not answer a write: {detail} reason={_first_line(text)!r}."
        )
    return UnavailableError(f"The object store failed or did not answer: {detail} reason={_first_line(text)!r}.")


def refused_create(said: TidemillError) -> TidemillError:
    """A create that was refused although no object is there: `said` is the refusal, with its status.

    S3 answers 409 while another create of the key is undecided: ours certainly did not happen. Any other answer says
    nothing that can be trusted.
    """
    detail = said.message.partition(": ")[2]
    if "status=409 " in detail:
        return UnavailableError(f"Another create of the object is under way: {detail}")
    return UnknownOutcomeError(f"The object store refuses a create, and no object is there: {detail}", fix=_GATEWAY)


def _first_line(text: str, limit: int = 300) -> str:
    return " ".join(text.partition("Debug source:")[0].split())[:limit]
