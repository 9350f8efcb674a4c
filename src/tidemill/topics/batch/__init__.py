"""Kafka record batches, format v2 (magic 2): header checks without copying, and a codec for internal use.

Owns the byte layout of a batch (KIP-98, Kafka's "Record Batch" page), and of the trailer that may follow it in storage.
Does not own offsets: base offset and partition leader epoch are outside the CRC (which covers byte 21 onward) and are
patched by other modules.
"""

from __future__ import annotations

from tidemill.topics.batch.decode import DecodedBatch, decode_batch, decode_columns, decode_opened, open_batch
from tidemill.topics.batch.encode import encode_batch
from tidemill.topics.batch.header import BatchHeader, parse_header, patch_base_offset, split_batches
from tidemill.topics.batch.records import Record, RecordColumns
from tidemill.topics.batch.validation import check_batch

__all__ = [
    "BatchHeader",
    "DecodedBatch",
    "Record",
    "RecordColumns",
    "check_batch",
    "decode_batch",
    "decode_columns",
    "decode_opened",
    "encode_batch",
    "open_batch",
    "parse_header",
    "patch_base_offset",
    "split_batches",
]
