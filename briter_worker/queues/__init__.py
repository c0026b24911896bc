"""Queues: where jobs wait, one module for each engine."""
