"""The rules of the sidecar: pure, without I/O, clock, randomness or logging."""
