"""Tells other programs what happened: stored first, then sent until it is received, or given up."""
