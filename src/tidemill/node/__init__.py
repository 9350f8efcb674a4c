"""node: one process assembled from a configuration, and the supervision of several.

    configuration ─► settings_from_config ─► node ─► assembly (one function per room) ─► http, captures, topic_binder
    supervise: the child processes of `tidemill up`

The room owns the wiring of rooms, the HTTP server and child processes. It owns no protocol and no storage rule. A node
is stateless: any other node on the same bucket and consensus can take over its work.
"""
