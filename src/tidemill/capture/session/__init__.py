"""Sessions of a capture: the rest of the package, assembled.

    capture (sessions with back-off) ─► session ─► bootstrap ─► continuity_check ─► stream_reader ─► collector
                                            └─► table_adder, relation_tracker, bad_rows, parked_streams
    teardown: `tidemill capture drop`

Owns the order of these steps. Every failure ends the session, and the next one starts from durable state.
"""
