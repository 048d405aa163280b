"""Where an exchange is cut: at every boundary of its format and one byte to each side, or everywhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.exhaustion.network import GOAWAYS, Fault, Way
from tests.exhaustion.rig import http2_frames, tls_records

_ONE_SEND = 65536
_SLICE = 262144
"""How an HTTP/1.1 client cuts a large body."""

if TYPE_CHECKING:
    from tests.exhaustion.rig import Exchange, Recording


def faults(way: Way) -> list[Fault]:
    """Those that can happen in that direction."""
    sending = {Fault.RST_ON_SEND, Fault.BLOCK, Fault.GOAWAY_HASTY}
    return [fault for fault in Fault if way is Way.REQUEST or fault not in sending]


def boundaries(exchange: Exchange, recording: Recording, way: Way, fault: Fault) -> list[int]:
    """Every line, chunk, frame or record boundary, and one byte to each side."""
    data = recording.request if way is Way.REQUEST else recording.reply
    if fault in GOAWAYS and way is Way.REPLY:
        # a peer says it between two frames, never inside one
        return [] if exchange.tls else _frame_ends(data)
    if exchange.tls:
        edges = [at for at, _, _ in tls_records(data)]
    elif exchange.http1:
        edges = [found.end() for found in re.finditer(rb"\n+", data)]
    else:
        edges = [at + head for at, _, _ in http2_frames(data) for head in (0, 9)]
    return _around([0, *edges, len(data)], len(data))


def everywhere(exchange: Exchange, recording: Recording, way: Way, fault: Fault) -> list[int]:
    """Every byte."""
    data = recording.request if way is Way.REQUEST else recording.reply
    if fault in GOAWAYS and way is Way.REPLY:
        return boundaries(exchange, recording, way, fault)
    return list(range(len(data) + 1))


def landmarks(exchange: Exchange, recording: Recording, way: Way, fault: Fault) -> list[int]:
    """Of a large request: what is at its ends, and where one send or window ends."""
    points = boundaries(exchange, recording, way, fault)
    if len(points) > 60:
        points = points[:30] + points[-30:]
    if exchange.http1 and way is Way.REQUEST:
        head = recording.request.index(b"\r\n\r\n") + 4
        points += _around([head + _ONE_SEND, head + _ONE_SEND + _SLICE], len(recording.request))
    return points


def _around(edges: list[int], end: int) -> list[int]:
    near = {edge + side for edge in edges for side in (-1, 0, 1)}
    return sorted(at for at in near if 0 <= at <= end)


def _frame_ends(data: bytes) -> list[int]:
    return [0, *(at + size for at, _, size in http2_frames(data))]
