"""Chat templates, rendered within limits."""
