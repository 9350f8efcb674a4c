"""Steps of tables, from planned bindings to one append each.

step_executor: the steps of a round, those within the inline limit computed here
distributed_step ─► shuffle: Spark tasks decode pieces and resolve hash ranges; the driver appends
oversized_step: a single time that exceeds the limits, read in pieces by the driver
"""
