"""consensus: registers, fenced logs and leases over an engine that already agrees (SQLite, PostgreSQL, memory).

Owns: compare-and-set, fencing by term, group commit, wake-ups, lease terms, who is SQLite's sequencer on
this machine, and `StateLog`: replicated state as commands and rollups on one fenced log.
Does not own: what the bytes mean, when a leader should step down, or how objects are stored.

Keeps C1-C4 of `api.py`, on every backend, in one process and across processes. A lost acknowledgement is
`Unknown` and is resolved by nonce (`resolve_append`, `resolve_cas`, or inside `StateLog`); it is never guessed.
"""
