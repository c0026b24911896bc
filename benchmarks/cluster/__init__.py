"""Benchmarks of the cluster, beside Procrastinate in the same Postgres."""
