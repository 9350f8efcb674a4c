"""Network side of the endpoint: listeners, connections, TLS, frames and memory.

    socket ─► listeners ─► connection_limits ─► listener_security ─► connection (or tls_socket) ─► framing ─► server

This package owns sockets and bytes. It does not know requests.
"""
