"""Heads that propose tokens from the hidden states of a model."""
