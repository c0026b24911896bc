"""Sinks: what happens to events. They are stored, sent to receivers, counted and logged."""
