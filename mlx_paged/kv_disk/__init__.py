"""K/V on a disk: full blocks that outlive the pool and the process."""
