"""Tests of each room; run from the root of the repository."""
