"""What happened in a cluster, kept in its Postgres: history, condition, and messages to be sent."""
