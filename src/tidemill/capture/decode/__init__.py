"""Capture, stage 2: from bytes of pgoutput and COPY to changes.

    receive_batch ─► row_blocks, columnar_tuples (by columns) ─► transaction_builder ─► fragments
                 └─► row_tuples (row by row: the reference of the columnar path)
    copy_text: rows of a snapshot; undecodable: a message that cannot be read

Pure. Owns the decoding of rows. Does not know topics or shapes.
"""
