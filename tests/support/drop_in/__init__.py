"""Prompt caches under test."""
