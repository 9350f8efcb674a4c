"""protobuf: Protobuf schemas: a file's text or its serialized descriptor, its model, and whether data of one can be
read with another."""
