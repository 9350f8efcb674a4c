"""Assignment of captures to nodes.

placement (one plan, computed alike by all nodes) ─► balancer ─► lease ─► capture
backoff: captures that this node cannot run
"""
