"""node: one process assembled from a configuration, and the supervision of several.

Owns the wiring of rooms (which sink feeds from which capture, who mints for which topic), the HTTP server
and child processes. Owns no protocol and no storage rule. A node is stateless: kill it, start another on the
same bucket and consensus.
"""
