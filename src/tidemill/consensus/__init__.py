"""consensus: registers, fenced logs and leases over an engine that already agrees (SQLite, PostgreSQL, memory).

    caller ─► api ─► client_base ─► sqlite | postgres | memory ─► transitions (the rules, pure)
    state_log: replicated state machines on one log; status: the status board

Owns compare-and-set, fencing by term, group commit, notifications, leases, and the choice of the SQLite sequencer.
Does not own what the bytes mean, when a leader should step down, or how objects are stored.

Keeps C1-C4 of `api.py` on every engine, in one process and across processes. A lost acknowledgement is `Unknown` and is
resolved by nonce (`resolve_append`, `resolve_cas`, or inside `StateLog`); it is never guessed.
"""
