"""Cases of the ops, float64 to compare with, and the Metal kernels on the emulator."""
