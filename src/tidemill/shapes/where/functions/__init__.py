"""PostgreSQL's functions and operators, by the type of their operands, as functions of a row. Comparisons are in
`operators`. A new function is an entry of FUNCTIONS in its module; a new operator is selected in
`compiler._compile_binary`, which also decides whether it may fail."""
