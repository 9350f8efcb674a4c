"""json: JSON values of a declared schema.

`dialect` finds values that Arrow's reader and the row-by-row decoder read differently, and `nested_values` reads
arrays, maps and structs. The decoders are one level above.
"""
