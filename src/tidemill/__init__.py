"""tidemill: every change from Postgres commits and Kafka producers, through one bucket, into exact keyed tables."""

__version__ = "0.1.0"
