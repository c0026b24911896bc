"""Sinks: who is told what happened."""
