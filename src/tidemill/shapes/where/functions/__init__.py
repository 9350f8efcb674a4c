"""PostgreSQL's functions and operators, by the type of their operands, as functions of a row. Comparisons are in
`operators`."""
