"""The queue as rows in Postgres, for many sites and many hosts."""
