"""The local side of a call, one module per binding: request → Call → forwarder → response."""
