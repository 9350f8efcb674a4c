"""A replicated state machine on one fenced log.

    command ──► codec ──► append at the expected position ──► apply ──► state
    open: newest rollup ──► records behind it ──► apply

Owns replay, following and rollups. Does not own commands, states or their transitions: each room brings its own.
"""
