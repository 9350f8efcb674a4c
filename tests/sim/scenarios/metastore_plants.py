"""Faults planted into the metastore: each replaces one of its parts. Unit tests of the parts plant them, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from typing import Any

from sim.world import swapped
from tidemill.base.errors import ConflictError, InvalidError, TidemillError
from tidemill.metastore.domain import domain as domain_module
from tidemill.metastore.domain import leader as leader_module
from tidemill.metastore.domain.apply import apply
from tidemill.metastore.domain.codec import decode_command
from tidemill.metastore.domain.commands import PersistManifest, ResetManifest
from tidemill.metastore.domain.leader import Leader
from tidemill.metastore.domain.replicated_manifest import ReplicatedManifests
from tidemill.metastore.domain.state import DomainState
from tidemill.metastore.lsm import gc as gc_module
from tidemill.metastore.lsm.file_store import FileName
from tidemill.metastore.lsm.gc import Identity, Retention, Roots, retention_of
from tidemill.metastore.lsm.manifest import Manifest

Rule = Callable[[DomainState, bytes, int, int], DomainState]

NEWER_EPOCH = "gc-newer-epoch"


def apply_lower_manifest(state: DomainState, data: bytes, position: int, term: int) -> DomainState:
    """Planted fault lower-manifest: the log accepts a manifest below the stored one."""
    command = decode_command(data)
    if not isinstance(command, PersistManifest):
        return apply(state, data, position, term)
    state.trim(command.manifest.last_seqno)
    state.manifest = command.manifest
    return state


def apply_without_delta(state: DomainState, data: bytes, position: int, term: int) -> DomainState:
    """Planted fault forget-delta: a reset does not set the deltas of seqno and epoch."""
    deltas = state.seqno_delta, state.epoch_delta
    state = apply(state, data, position, term)
    if isinstance(decode_command(data), ResetManifest):
        state.seqno_delta, state.epoch_delta = deltas
    return state


class LateReplay(Leader):
    """Planted fault replay-at-persisted: a new leader treats the batch after the persisted seqno as persisted."""

    async def _replay(self) -> None:
        if self._log.state.volatile:
            self._fed_seqno = self._log.state.volatile[0].seqno
        await super()._replay()


class SilentManifests(ReplicatedManifests):
    """Planted fault silent-reject: a manifest that the log rejected is reported as written."""

    def __init__(self, *args: Any, failed: Callable[[TidemillError], None], **options: Any) -> None:
        def unless_rejected(error: TidemillError) -> None:
            if not isinstance(error, ConflictError | InvalidError):
                failed(error)

        super().__init__(*args, failed=unless_rejected, **options)

    async def write(self, manifest: Manifest) -> None:
        with contextlib.suppress(ConflictError, InvalidError):
            await super().write(manifest)


def _of_any_epoch(name: FileName, roots: Roots, live: Set[Identity]) -> Retention | None:
    """Plant the fault gc-newer-epoch: a file of a newer epoch is treated as one of an older epoch."""
    reason = retention_of(name, roots, live)
    return None if reason is Retention.NEWER_EPOCH else reason


def rule_of(fault: str) -> Rule:
    """Return the rules of the log, with the fault if it is one of theirs."""
    rules: dict[str, Rule] = {"lower-manifest": apply_lower_manifest, "forget-delta": apply_without_delta}
    return rules.get(fault, apply)


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant one of the faults of the domain and of its database."""
    match fault:
        case "lower-manifest" | "forget-delta":
            place = swapped(domain_module, "apply", rule_of(fault))
        case "replay-at-persisted":
            place = swapped(domain_module, "Leader", LateReplay)
        case "silent-reject":
            place = swapped(leader_module, "ReplicatedManifests", SilentManifests)
        case "gc-newer-epoch":
            place = swapped(gc_module, "retention_of", _of_any_epoch)
        case _:
            yield
            return
    with place:
        yield
