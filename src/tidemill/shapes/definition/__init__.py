"""Shapes, stage 1: checks a request and plans it.

    request ─► permissions, signed_urls, server_defined ─► planner ─► compiler_thread ─► definition
    subset: some rows of a shape at the current time

Owns the definition of a shape. Pure, except for the thread of the compiler.
"""
