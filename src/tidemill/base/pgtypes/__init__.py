"""Values of PostgreSQL types in their text form, and their conversions. Pure.

    text ──► text.py (canonical form) ──► arrays.py, intervals.py (nested and composite forms)
                     └──► debezium.py (JSON), avro.py (Avro) of change events

Owns the rules of PostgreSQL's input and output functions. Does not own Arrow types (`shards/parts/pg_columns.py`).
"""
