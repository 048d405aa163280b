"""Sockets, TLS, HTTP/1.1 and HTTP/2 on trio; nothing here knows what A2A is."""
