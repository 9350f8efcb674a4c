"""Groups of the consumer protocol (KIP-848).

requests, classic_members (members of either protocol) ─► reconciliation (target, assignments) ─► state
                                  │                              ├─► assignors (which member should have what)
                                  └──────────────────────────────┴─► sizes (what fits in one write)
"""
