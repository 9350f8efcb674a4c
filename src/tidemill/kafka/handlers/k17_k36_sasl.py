"""Handlers of SaslHandshake (17), versions 0 and 1, and SaslAuthenticate (36), versions 0 to 2: the client chooses one
of the listener's mechanisms, then sends its messages.

After version 0 of the handshake each SASL message is a frame without a header, after version 1 it is inside
SaslAuthenticate (KIP-152). A mechanism that the listener lacks gets UNSUPPORTED_SASL_MECHANISM with the supported ones,
and the connection ends, as in Kafka. A listener without SASL answers ILLEGAL_SASL_STATE.

A failure of an authentication step is SASL_AUTHENTICATION_FAILED with one text for all reasons, after which the
connection ends. From version 1 on the answer contains the lifetime of the session (KIP-368): the client
re-authenticates before its end, on the same connection. An internal error ends the connection without an answer,
because clients interpret every code as a wrong password.
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Reply, Request, begin_decoded, decode_body, encode_answer
from tidemill.kafka.api.sasl_step import advance_authentication
from tidemill.kafka.schema.codec_compiler import Body, decode_request
from tidemill.security.scram import AuthenticationFailedError


async def choose_mechanism(context: Context, request: Request, body: Body) -> Body:
    visitor, mechanism = request.visitor, body["mechanism"]
    gate = visitor.gate
    if not gate.mechanisms or gate.authenticator is None or (visitor.known and request.version == 0):
        visitor.rejected = "SASL handshake that the listener does not expect"
        return {"error_code": error_codes.ILLEGAL_SASL_STATE, "mechanisms": []}
    if mechanism not in gate.mechanisms:
        visitor.rejected = f"mechanism that the listener does not support: mechanism={mechanism[:40]!r}"
        return {"error_code": error_codes.UNSUPPORTED_SASL_MECHANISM, "mechanisms": list(gate.mechanisms)}
    visitor.mechanism = mechanism
    visitor.exchange = gate.authenticator.start_exchange(mechanism, visitor.host)
    visitor.raw = request.version == 0
    return {"error_code": 0, "mechanisms": list(gate.mechanisms)}


def _handshake_error(body: Body, code: int) -> Body:
    return {"error_code": code, "mechanisms": []}


async def begin_authentication(context: Context, request: Request) -> Reply:
    body = await decode_body(context.pace, request, _decode)
    return await encode_answer(context.pace, request, await _authenticate(context, request, bytes(body["auth_bytes"])))


def _decode(request: Request) -> Body:
    return decode_request(request.key, request.version, request.view, request.position)


async def _authenticate(context: Context, request: Request, message: bytes) -> Body:
    visitor = request.visitor
    if visitor.exchange is None:
        visitor.rejected = "SaslAuthenticate before SaslHandshake"
        return _authentication_error(error_codes.ILLEGAL_SASL_STATE, "SaslAuthenticate requires a SaslHandshake.")
    try:
        step, lifetime_ms = await advance_authentication(context, visitor, message)
    except AuthenticationFailedError:
        visitor.rejected = ""
        text = f"Authentication failed: invalid credentials. mechanism={visitor.mechanism}"
        return _authentication_error(error_codes.SASL_AUTHENTICATION_FAILED, text)
    return {"error_code": 0, "error_message": None, "auth_bytes": step.reply, "session_lifetime": lifetime_ms}


def _authentication_error(code: int, message: str) -> Body:
    return {"error_code": code, "error_message": message, "auth_bytes": b"", "session_lifetime": 0}


APIS: Final = (
    Api(17, "sasl_handshake", 0, 1, begin_decoded(choose_mechanism, _handshake_error), barrier=True),
    Api(36, "sasl_authenticate", 0, 2, begin_authentication, barrier=True),
)
"""Barriers: the next request of the connection begins after the handshake, or the step of authentication, has ended."""
