"""Adapters of single requests: low-rank terms in addition to the weights of a model."""
