"""Handler of SaslAuthenticate (36), versions 0 to 2: one message of the mechanism that SaslHandshake chose.

A failure is SASL_AUTHENTICATION_FAILED with one text for all reasons, after which the connection ends. From version 1
on the answer contains the lifetime of the session (KIP-368): the client re-authenticates before its end, on the same
connection. An internal error ends the connection without an answer, because clients interpret every code as a wrong
password.
"""

from __future__ import annotations

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Reply, Request, decode_body, encode_answer
from tidemill.kafka.api.sasl_step import advance_authentication
from tidemill.kafka.schema.codec_compiler import Body, decode_request
from tidemill.security.scram import AuthenticationFailedError


async def begin_authentication(context: Context, request: Request) -> Reply:
    body = await decode_body(context.pace, request, _decode)
    return await encode_answer(context.pace, request, await _handle(context, request, bytes(body["auth_bytes"])))


def _decode(request: Request) -> Body:
    return decode_request(request.key, request.version, request.view, request.position)


async def _handle(context: Context, request: Request, message: bytes) -> Body:
    visitor = request.visitor
    if visitor.exchange is None:
        visitor.rejected = "SaslAuthenticate before SaslHandshake"
        return _error_result(error_codes.ILLEGAL_SASL_STATE, "SaslAuthenticate requires a SaslHandshake.")
    try:
        step, lifetime_ms = await advance_authentication(context, visitor, message)
    except AuthenticationFailedError:
        visitor.rejected = ""
        text = f"Authentication failed: invalid credentials. mechanism={visitor.mechanism}"
        return _error_result(error_codes.SASL_AUTHENTICATION_FAILED, text)
    return {"error_code": 0, "error_message": None, "auth_bytes": step.reply, "session_lifetime": lifetime_ms}


def _error_result(code: int, message: str) -> Body:
    return {"error_code": code, "error_message": message, "auth_bytes": b"", "session_lifetime": 0}


API = Api(36, "sasl_authenticate", 0, 2, begin_authentication, barrier=True)
"""A barrier: the next request of the connection begins after the authentication step has ended."""
