"""What the worker costs, side by side with what a user would pick instead, and with the limit git sets."""
