"""Capture, stage 4: changes as keys and values of records.

    rows ─► row_encoder | debezium_json | debezium_avro      row by row: the reference
    blocks ─► columnar_encoder | debezium_avro_columnar      by columns: the same bytes
    avro_schemas ─► schema registry

Owns the three envelopes. Does not batch or send.
"""
