"""Requests in, tokens out; threads."""
