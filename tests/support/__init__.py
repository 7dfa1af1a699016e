"""What tests of several files share."""

TIMEOUT = 600
"""Seconds after which something hangs, even on a machine that does ten things at once."""
