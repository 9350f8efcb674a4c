"""schema: bytes ↔ values. `compiled` builds codecs of the cold APIs from kio's dataclasses; `produce` and
`fetch` are written by hand, because every record passes through them."""
