"""node: one process assembled from a configuration, and the supervision of several.

    configuration ─► settings_from_config ─► node (one assembly per room) ─► http, captures, topic_binder
    supervise: the child processes of `tidemill up`

Owns the wiring of rooms, the HTTP server and child processes. Owns no protocol and no storage rule. A node is
stateless: another one on the same bucket and consensus takes its place.
"""
