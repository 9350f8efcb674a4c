"""HTTP server of a node.

socket ─► connection_limits ─► server (ASGI) ─► auth ─► limits ─► app ─► routes of the rooms
"""
