"""One step of SASL authentication on a connection, from SaslAuthenticate or from a bare message after an old handshake.

A failed step is answered after a delay that grows with the failures of its address, and is logged. Then the connection
ends. The client does not learn the reason of the failure.

An internal failure (the metastore is unavailable) says nothing about the client: the connection ends, and clients
reconnect. So it does if too many passwords are being checked.
"""

from __future__ import annotations

import asyncio

from tidemill.kafka.api.context import Context
from tidemill.kafka.net.listener_security import ClientIdentity, ConnectionRejectedError
from tidemill.security.sasl import SaslStep, TooManyChecksError
from tidemill.security.scram import AuthenticationFailedError


async def advance_authentication(context: Context, visitor: ClientIdentity, message: bytes) -> tuple[SaslStep, int]:
    """Process one message and return the step and the lifetime of the session in ms (0 = unlimited).

    Raises AuthenticationFailedError, UnavailableError, ConnectionRejectedError.
    """
    exchange = visitor.exchange
    assert exchange is not None
    try:
        step = await exchange.step(message)
        if not step.principal:
            return step, 0
        lifetime_ms = _lifetime_ms(context, visitor, step)
        if visitor.known and (visitor.principal, visitor.proved_by) != (step.principal, visitor.mechanism):
            raise AuthenticationFailedError(
                f"re-authentication must keep {visitor.principal}, by {visitor.proved_by}", step.principal
            )
    except AuthenticationFailedError as refused:
        visitor.exchange = None
        await _log_and_delay(context, visitor, refused)
        raise
    except TooManyChecksError as busy:
        raise ConnectionRejectedError(str(busy)) from busy
    visitor.exchange = None
    visitor.principal = step.principal
    visitor.proved_by = visitor.mechanism
    visitor.expires_s = context.clock.monotonic_s() + lifetime_ms / 1000 if lifetime_ms else 0.0
    visitor.known = True
    visitor.raw = False
    return step, lifetime_ms


def _lifetime_ms(context: Context, visitor: ClientIdentity, step: SaslStep) -> int:
    lifetimes = [int(visitor.gate.session_lifetime_s * 1000)] if visitor.gate.session_lifetime_s else []
    if step.expires_ms:
        lifetimes.append(step.expires_ms - context.clock.now_ms())
    if not lifetimes:
        return 0
    if min(lifetimes) <= 0:
        raise AuthenticationFailedError("the token has expired", step.principal)
    return min(lifetimes)


async def _log_and_delay(context: Context, visitor: ClientIdentity, refused: AuthenticationFailedError) -> None:
    context.audit.log_refusal(
        "kafka.authentication_failed",
        (visitor.host, refused.user),
        host=visitor.host,
        user=refused.user,
        mechanism=visitor.mechanism,
        reason=refused.message,
    )
    await asyncio.sleep(visitor.gate.failures.delay_s(visitor.host, context.clock.monotonic_s()))
