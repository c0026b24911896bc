"""The cluster: many sites on many hosts, with nothing shared but Postgres."""
