"""Output of every command in the format that `-o` names. Nothing else in the room formats a table.

rows, columns ─► output (Output: the options and the choice) ─┬─► text_table    table, for people
                                                              └─► data_lines    json, jsonl, csv, for programs
"""
