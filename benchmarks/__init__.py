"""Benchmarks: the sidecar beside its peers, on the same work, in one run (``make bench``)."""
