"""Adapters of single requests: low-rank terms beside the weights of a model."""
