"""What one feature costs or saves, a script each: samples' random numbers, deterministic kernels, ..."""
