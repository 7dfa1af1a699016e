"""Grammars that the tokens of a request follow."""
