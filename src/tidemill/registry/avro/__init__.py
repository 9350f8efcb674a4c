"""avro: Avro schemas (specification 1.12): the model of a schema, and whether data of one can be read with another."""
