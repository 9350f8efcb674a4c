"""json: values of JSON.

`dialect` finds values of a declared schema that Arrow's reader and the row-by-row decoder read differently, and
`nested_values` reads arrays, maps and structs. `captured_values` does the former for rows that capture wrote, also for
their texts. The decoders are one level above.
"""
