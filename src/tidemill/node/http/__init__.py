"""HTTP server of a node.

socket ─► connection_limits ─► server (ASGI) ─► auth ─► limits ─► routes of the rooms
"""
