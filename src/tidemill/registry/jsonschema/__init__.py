"""jsonschema: JSON Schema (drafts 4 to 2020-12): the model of a schema, and whether data of one is valid for
another."""
