"""Stage 2: attention kernels of our own for compute capability 9.0. Must not import another implementation."""
