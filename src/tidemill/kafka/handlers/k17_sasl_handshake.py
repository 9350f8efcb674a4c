"""Handler of SaslHandshake (17), versions 0 and 1: the client chooses one of the listener's mechanisms.

After version 0 each SASL message is a frame without a header, after version 1 it is inside SaslAuthenticate (KIP-152).
A mechanism that the listener lacks gets UNSUPPORTED_SASL_MECHANISM with the supported ones, and the connection ends, as
in Kafka. A listener without SASL answers ILLEGAL_SASL_STATE.
"""

from __future__ import annotations

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    visitor, mechanism = request.visitor, body["mechanism"]
    gate = visitor.gate
    if not gate.mechanisms or gate.authenticator is None or (visitor.known and request.version == 0):
        visitor.rejected = "SASL handshake that the listener does not expect"
        return {"error_code": error_codes.ILLEGAL_SASL_STATE, "mechanisms": []}
    if mechanism not in gate.mechanisms:
        visitor.rejected = f"mechanism that the listener does not support: mechanism={mechanism[:40]!r}"
        return {"error_code": error_codes.UNSUPPORTED_SASL_MECHANISM, "mechanisms": list(gate.mechanisms)}
    visitor.mechanism = mechanism
    visitor.exchange = gate.authenticator.start_exchange(mechanism)
    visitor.raw = request.version == 0
    return {"error_code": 0, "mechanisms": list(gate.mechanisms)}


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "mechanisms": []}


API = Api(17, "sasl_handshake", 0, 1, begin_decoded(handle, error_answer), barrier=True)
"""A barrier: the next request of the connection begins after the handshake has ended."""
