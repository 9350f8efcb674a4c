"""Nested values of columns: arrays, structs and maps. Pure.

type_names ─► the grammar of nested type strings
values     ─► equality, sizes, and the normal form of maps, by columns
pg_arrays  ─► PostgreSQL's text of arrays, split into the texts of the elements
"""
