"""Generated protobuf messages of A2A 1.0: written by proto/generate, never by hand."""
