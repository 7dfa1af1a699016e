"""The blocks of each sequence, and the arrays that hold their keys and values."""
