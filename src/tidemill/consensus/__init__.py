"""consensus: registers, fenced logs and leases over an engine that already agrees (SQLite, PostgreSQL, memory).

    caller ─► api ─► client_base ─► sqlite | postgres | memory ─► operations (the rules, pure)
    state_log: replicated state machines on one log; status: the status board

Owns compare-and-set, fencing by term, group commit, notifications, leases, and the election of the SQLite sequencer.
Does not own the meaning of the bytes, the decision to step down as a leader, or the storage of objects.

Every engine satisfies the invariants of `api.py`, within one process and across processes. A lost acknowledgement is
`UnknownOutcomeError` and is resolved by nonce (`resolve_append`, `resolve_cas`, or inside `StateLog`), never guessed.
"""
