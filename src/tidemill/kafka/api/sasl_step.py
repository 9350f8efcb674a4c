"""One step of authentication on a connection: what SaslAuthenticate, or a bare message after an old handshake, does.

PV1  A failed step is answered after a delay that grows with the failures of its address, and told; then the
     connection ends. Nobody is told why, only that.
PV2  A failure of ours (the metastore is away) says nothing about the client: the connection ends, clients come again.
"""

from __future__ import annotations

import asyncio

from tidemill.kafka.api.context import Context
from tidemill.kafka.net.listener_security import ClientIdentity
from tidemill.security.sasl import Step
from tidemill.security.scram import AuthenticationFailedError


async def prove(context: Context, visitor: ClientIdentity, message: bytes) -> tuple[Step, int]:
    """(the step, ms that the session lives from now on; 0 = for ever). Raises AuthenticationFailedError,
    Unavailable."""
    exchange = visitor.exchange
    assert exchange is not None
    try:
        step = await exchange.step(message)
        if not step.principal:
            return step, 0
        lifetime_ms = _lifetime_ms(context, visitor, step)
        if visitor.known and (visitor.principal, visitor.proved_by) != (step.principal, visitor.mechanism):
            raise AuthenticationFailedError(
                f"it was {visitor.principal} before, by {visitor.proved_by}", step.principal
            )
    except AuthenticationFailedError as refused:
        visitor.exchange = None
        await _slow_down(context, visitor, refused)
        raise
    visitor.exchange = None
    visitor.principal = step.principal
    visitor.proved_by = visitor.mechanism
    visitor.expires_s = context.clock.monotonic_s() + lifetime_ms / 1000 if lifetime_ms else 0.0
    visitor.known = True
    visitor.raw = False
    return step, lifetime_ms


def _lifetime_ms(context: Context, visitor: ClientIdentity, step: Step) -> int:
    lifetimes = [int(visitor.gate.session_lifetime_s * 1000)] if visitor.gate.session_lifetime_s else []
    if step.expires_ms:
        lifetimes.append(step.expires_ms - context.clock.now_ms())
    if not lifetimes:
        return 0
    if min(lifetimes) <= 0:
        raise AuthenticationFailedError("the proof has expired meanwhile", step.principal)
    return min(lifetimes)


async def _slow_down(context: Context, visitor: ClientIdentity, refused: AuthenticationFailedError) -> None:
    context.audit.refused(
        "kafka.authentication_failed",
        (visitor.host, refused.user),
        host=visitor.host,
        user=refused.user,
        mechanism=visitor.mechanism,
        reason=refused.message,
    )
    await asyncio.sleep(visitor.gate.failures.delay_s(visitor.host, context.clock.monotonic_s()))
