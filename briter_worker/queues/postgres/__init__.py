"""The queue in Postgres: publications as rows, for many sites and nodes. Needs the extra `[postgres]`."""
