"""Server of the endpoint: accepts clients, runs their requests concurrently and answers in order.

server (life cycle) ─► client_session (one connection: pipelining, back-pressure) ─► api ─► handlers
cpu_meter: loop time of a request, for the request quota
"""
