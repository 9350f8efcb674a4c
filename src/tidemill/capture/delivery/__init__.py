"""Capture, stage 3: fragments to every consumer in commit order, and flush notices back.

    fragments ─► collector ─► sinks (durable, awaited) and taps (in memory)
    flush notices ─► flush_alignment ─► flush_tracker ─► the LSN that may be confirmed

Owns fan-out and confirmation. Does not own what a consumer does with a fragment.
"""
