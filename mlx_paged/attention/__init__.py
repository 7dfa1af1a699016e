"""How one layer attends over the pool."""
