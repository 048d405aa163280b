"""Cards as the local application sees them: the agent's present card, pointing at this sidecar."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.agent import Unavailable
from sidecar.config import TcpAddress
from sidecar.core import convert, errors
from sidecar.core.card import CardError
from sidecar.core.card_rewrite import Served, rewrite_card
from sidecar.core.http_common import JSON_TYPE
from sidecar.core.spec import Binding
from sidecar.core.types import Form, Payload, header
from sidecar.discovery import CARD_PATH, LEGACY_PATH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.agent import Agent
    from sidecar.config import Address
    from sidecar.core.types import Headers
    from sidecar.wire.http1_server import Http1Request

_PATHS = frozenset({CARD_PATH, LEGACY_PATH})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One bound listener: what it speaks, where, and for which agent alone."""

    binding: Binding
    address: Address
    agent: str | None
    tls: bool = False
    advertise: str | None = None
    """Authority to publish instead of the bound address."""
    asks_for_token: bool = False


class CardDesk:
    """Fetches, rewrites and serves the cards of all agents."""

    def __init__(self) -> None:
        self._places: Sequence[Place] = ()

    def use(self, places: Sequence[Place]) -> None:
        """From now on cards lead to these listeners."""
        self._places = places

    def is_card_path(self, path: str) -> bool:
        """Whether a card is served at `path` (below an agent's prefix)."""
        return path in _PATHS

    def others_than(self, binding: Binding) -> str:
        """The listeners of other bindings, for errors that name the right one."""
        others = [one for one in self._places if one.binding is not binding]
        return ", ".join(f"{one.address} ({one.binding})" for one in others)

    async def serve(self, request: Http1Request, agent: Agent, place: Place) -> None:
        """Answer a GET for the card of `agent`, asked of the listener at `place`."""
        if request.method not in {"GET", "HEAD"}:
            await request.respond(405, [("allow", "GET, HEAD")], b"")
            return
        authority = header(request.headers, "host") or ""
        try:
            data = await agent.fresh_card()
            body = self.rewrite(data, agent.name, place, authority)
        except (Unavailable, CardError) as error:
            record = errors.own("CARD_UNAVAILABLE", str(error), agent=agent.name)
            failed = b'{"error":' + errors.http_error_object(record, 502) + b"}"
            await request.respond(502, [("content-type", JSON_TYPE)], failed)
            return
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers: Headers = [("etag", etag), ("cache-control", f"max-age={agent.card_max_age:.0f}")]
        if agent.card_last_modified:
            headers.append(("last-modified", agent.card_last_modified))
        if is_current(header(request.headers, "if-none-match"), etag):
            await request.respond(304, headers, b"")
        else:
            await request.respond(200, [("content-type", JSON_TYPE), *headers], body)

    def rewrite(self, data: bytes, agent: str, place: Place, authority: str) -> bytes:
        """The card `data` of `agent` for a client that asked `place` under `authority`."""
        here = [one for one in self._places if one == place]
        others = [one for one in self._places if one != place]
        served = [
            _served(one, agent, authority if one is place or one == place else "")
            for one in (*here, *others)
            if one.agent in {None, agent}
        ]
        return rewrite_card(
            data,
            [one for one in served if one is not None],
            security_schemes=_TOKEN_SCHEME if place.asks_for_token else None,
        )

    def rewrite_answer(self, answer: Payload, agent: str, place: Place, authority: str) -> Payload:
        """An extended card, in either form, with the same rewrite; raises CardError."""
        data = answer.data
        if answer.form is Form.PROTO:
            data = convert.proto_to_json("AgentCard", data)
        data = self.rewrite(data, agent, place, authority)
        if answer.form is Form.PROTO:
            data = convert.json_to_proto("AgentCard", data)
        return Payload(answer.form, data)


# What a listener with a token asks for, as a card says it (A2A 4.5).
_TOKEN_SCHEME = {"sidecarToken": {"httpAuthSecurityScheme": {"scheme": "Bearer"}}}


def _served(place: Place, agent: str, authority: str) -> Served | None:
    """The interface of a card that leads to `place`; None when it has no address to publish."""
    if place.advertise or not authority:
        if not place.advertise and not isinstance(place.address, TcpAddress):
            return None
        authority = place.advertise or str(place.address)
    if place.binding is Binding.GRPC:
        return Served(place.binding, authority, "" if place.agent else agent)
    path = "" if place.agent else f"/agents/{agent}"
    if place.binding is Binding.JSONRPC and not path:
        path = "/"
    return Served(place.binding, f"{'https' if place.tls else 'http'}://{authority}{path}")


def is_current(sent: str | None, etag: str) -> bool:
    """Whether a client that sent this If-None-Match has the representation (RFC 9110 13.1.2)."""
    tags = {tag.strip().removeprefix("W/") for tag in (sent or "").split(",")}
    return "*" in tags or etag in tags
