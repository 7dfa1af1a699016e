"""Which blocks each sequence owns, and the arrays that hold their keys and values."""
