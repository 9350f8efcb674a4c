"""Replicated state machines, each on one fenced log.

    command ──► append at the expected position ──► apply ──► state
    open: newest rollup ──► records after it ──► apply

Owns replay, following a log, and rollups. Does not own commands, states or transitions: each caller brings its own.
"""
