"""Transitions of a domain's state. Pure: checks everything, then writes. A rejected update changes nothing.

update             accepted when                                                effect
set domain uuid    none is set                                                  set it
write batch        uuid matches, rows, seqno above the newest                   append to volatile at its seqno
persist manifest   uuid matches, epoch is that of the record's own term,        store it; drop volatile ≤ its seqno
                   counts from 0, last_seqno was issued, neither seqno, epoch nor number
                   below stored
reset manifest     volatile empty, no manifest or one of seqno 0                replace uuid and manifest; set the
                                                                                deltas so that this record gets the
                                                                                manifest's seqno, this term its epoch
"""

from __future__ import annotations

from typing import assert_never

from tidemill.base.errors import ConflictError, CorruptError
from tidemill.metastore.domain.codec import decode_command
from tidemill.metastore.domain.commands import PersistManifest, ResetManifest, SetDomainUuid, WriteBatch
from tidemill.metastore.domain.state import DomainState, VolatileBatch, batch_bytes


class UnreadableRecordError(Exception):
    """The log contains a record that this version cannot decode.

    Deliberately not a TidemillError, which would reject the record: a process that skipped a record which others
    applied would have a different state. The state log stops at the record and reports CorruptError from then on.
    """


def apply(state: DomainState, data: bytes, position: int, term: int) -> DomainState:
    """Apply the update in `data`, the record at `position` and `term`; return the same, changed object.

    Raises ConflictError or InvalidError, having changed nothing; UnreadableRecordError if the bytes are not an update.
    """
    try:
        command = decode_command(data)
    except CorruptError as error:
        raise UnreadableRecordError(error.message) from error
    command.check(state)
    match command:
        case WriteBatch(keys=keys, values=values):
            seqno = state.seqno(position)
            if seqno <= state.newest_seqno:
                raise ConflictError(
                    f"the seqno of a batch would decrease: seqno={seqno} newest_seqno={state.newest_seqno} "
                    f"position={position}.",
                    fix="Report this: log positions only grow.",
                )
            state.volatile.append(VolatileBatch(seqno, keys, values))
            state.volatile_bytes += batch_bytes(keys, values)
        case PersistManifest(manifest=manifest):
            if manifest.epoch != state.epoch(term):
                raise ConflictError(
                    f"a manifest must be persisted in its own term: epoch={manifest.epoch} "
                    f"expected={state.epoch(term)} term={term}.",
                    current=state.manifest,
                    fix="Step down and reopen.",
                )
            state.trim(manifest.last_seqno)
            state.manifest = manifest
        case SetDomainUuid(domain_uuid=domain_uuid):
            state.domain_uuid = domain_uuid
        case ResetManifest(domain_uuid=domain_uuid, manifest=restored):
            state.domain_uuid = domain_uuid
            state.manifest = restored
            state.seqno_delta = (restored.last_seqno if restored else 0) - position
            state.epoch_delta = (restored.epoch if restored else 0) - term
        case _:
            assert_never(command)
    return state
