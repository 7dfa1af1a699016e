"""Which K/V stays in the pool: tokens that an engine computes a second time."""
