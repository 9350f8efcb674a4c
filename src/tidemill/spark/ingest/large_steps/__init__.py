"""Steps that exceed the limits of an inline step.

distributed_step ─► shuffle: Spark tasks decode pieces and resolve hash ranges; the driver appends
oversized_step: a single time that exceeds the limits, read in pieces by the driver
"""
