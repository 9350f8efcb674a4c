"""Codecs between bytes and values.

`codec_compiler` builds the codecs of the rarely used APIs from kio's dataclasses. `produce` and `fetch` are written by
hand, because every record passes through them.
"""
