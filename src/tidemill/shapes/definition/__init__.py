"""Shapes, stage 1: what is asked for, checked and planned.

    request ─► permissions, signed_urls, server_defined ─► planner ─► compiler_thread ─► definition
    subset: some rows of a shape as they are now

Owns the definition of a shape. Pure, except for the thread of the compiler.
"""
