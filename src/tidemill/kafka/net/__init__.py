"""The network side of the endpoint: listeners, connections, TLS, frames, memory.

    socket ─► listeners ─► connection_limits ─► listener_security ─► connection (or tls_socket) ─► framing ─► server

Owns sockets and bytes. Does not know requests.
"""
