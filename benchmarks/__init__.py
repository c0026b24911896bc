"""Benchmarks: the worker, the alternatives and git's own limit, measured side by side in one run."""
