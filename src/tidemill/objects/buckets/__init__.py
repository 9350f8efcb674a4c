"""buckets: objects in S3, Google Cloud Storage and Azure Blob Storage, through obstore.

s3 | gcs | azure: URL ─► configuration of the library;  bucket: the contract on its store;  errors: translation
"""
