"""gRPC messages in an HTTP/2 body: the length prefix, and gzip on the way in."""

from __future__ import annotations

import zlib

from sidecar.core.payload import PayloadError

_PREFIX = 5


class MessageTooLarge(ValueError):
    """A gRPC message above the limit of its reader, in bytes."""

    def __init__(self, limit: int, size: int | None) -> None:
        what = "a compressed message" if size is None else f"a message of {size} bytes"
        super().__init__(f"{what} is larger than the limit of {limit} bytes")
        self.limit = limit
        self.size = size
        """As announced; None for one that is too large once decompressed."""


def grpc_frame(message: bytes) -> bytes:
    """A message with its prefix: one byte of flags (not compressed), four of length."""
    return b"\0%b%b" % (len(message).to_bytes(4, "big"), message)


class GrpcReader:
    """A body cut into messages, however its bytes arrive (gRPC over HTTP/2, "Length-Prefixed-Message").

    `encoding` is the peer's ``grpc-encoding``; of compressed messages only gzip ones are read, and
    `limit` bounds a message both as it travels and as it is after decompression. An error is raised
    after the messages before it have been handed out, and by every call from then on.
    """

    def __init__(self, limit: int, encoding: str | None) -> None:
        self._limit = limit
        self._encoding = encoding
        self._buffer = bytearray()
        self._fault: PayloadError | MessageTooLarge | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes.

        Raises MessageTooLarge as soon as a length is announced that is above the limit, and
        PayloadError for flags and compression that cannot be read.
        """
        messages: list[bytes] = []
        if self._fault is None:
            self._buffer += data
            try:
                self._cut(messages)
            except (PayloadError, MessageTooLarge) as error:
                self._fault = error
                self._buffer.clear()
        if self._fault is not None and not messages:
            raise self._fault
        return messages

    def end(self) -> None:
        """The body is over. Raises PayloadError when it ends inside a message, or a fault not yet told."""
        if self._fault is not None:
            raise self._fault
        if self._buffer:
            raise PayloadError("the body ends inside a message")

    def _cut(self, messages: list[bytes]) -> None:
        buffer = self._buffer
        start = 0
        while len(buffer) >= (body := start + _PREFIX):
            flag = buffer[start]
            if flag > 1:
                raise PayloadError("a message begins with unknown flags")
            if flag and self._encoding != "gzip":
                raise PayloadError("a message is compressed in a way that was not agreed")
            size = int.from_bytes(buffer[start + 1 : body], "big")
            if size > self._limit:
                raise MessageTooLarge(self._limit, size)
            if len(buffer) < body + size:
                break
            message = bytes(memoryview(buffer)[body : body + size])
            messages.append(self._gunzip(message) if flag else message)
            start = body + size
        del buffer[:start]

    def _gunzip(self, message: bytes) -> bytes:
        inflater = zlib.decompressobj(wbits=31)
        try:
            # One byte more than allowed tells "at the limit" from "above it".
            text = inflater.decompress(message, self._limit + 1)
        except zlib.error:
            raise PayloadError("a compressed message is not gzip") from None
        if len(text) > self._limit:
            raise MessageTooLarge(self._limit, None)
        if not inflater.eof:
            raise PayloadError("a compressed message is cut short")
        if inflater.unused_data:
            raise PayloadError("a compressed message has bytes after its end")
        return text
