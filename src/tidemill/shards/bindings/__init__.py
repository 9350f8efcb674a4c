"""Bindings: the times of a source's records.

    progress of a source ─► minter ─► reclock (which times) ─► remap (fenced log)

Owns the remap shard of a source. The terms are Materialize's.
"""
