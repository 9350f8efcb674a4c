"""Server of the endpoint: accepts clients, runs their requests concurrently and answers in order.

server (life cycle) ─► client_session (one connection: pipelining, back-pressure) ─► api ─► handlers
request_quotas: what a request is charged, and how long its client is muted
"""
