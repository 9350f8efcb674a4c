"""Groups of the classic protocol.

requests (join, sync, heartbeat, leave) ─► rebalance (phases of a rebalance) ─► state (one group, its answers)
"""
