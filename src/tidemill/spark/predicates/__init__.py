"""predicates: boolean SQL expressions over the columns of Arrow tables.

text ─► parser (precedence climbing) ─► operators (typed, by columns) ─► predicate: three-valued, one value per row

A small subset of SQL, in which PostgreSQL and Spark agree. Everything beyond it is refused in words, so that an
expression never means something else than in the database.
"""
