"""Cards as the local application sees them: the agent's present card, pointing at this sidecar."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from sidecar.agent import Unavailable
from sidecar.config import TcpAddress
from sidecar.core import convert, errors, failover
from sidecar.core.card import CardError
from sidecar.core.card_rewrite import Served, rewrite_card
from sidecar.core.http_common import JSON_TYPE
from sidecar.core.spec import Binding
from sidecar.core.types import Form, Kind, Payload, header
from sidecar.discovery import CARD_PATH, LEGACY_PATH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.agent import Agent
    from sidecar.config import Address
    from sidecar.core.types import Call, ErrorRecord, Headers
    from sidecar.result import Result
    from sidecar.wire.http1_server import Http1Request

_PATHS = frozenset({CARD_PATH, LEGACY_PATH})
_DEADLINE_SECONDS = 10.0
"""For a card that a client waits for; a fetch may take as long."""
_AUTHORITY = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


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
        body = await self._fresh(request, agent, place)
        if body is None:
            return
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers: Headers = [("etag", etag), ("cache-control", f"max-age={agent.card_max_age:.0f}")]
        if agent.card_last_modified:
            headers.append(("last-modified", agent.card_last_modified))
        if is_current(header(request.headers, "if-none-match"), etag):
            await request.respond(304, headers, b"")
        else:
            await request.respond(200, [("content-type", JSON_TYPE), *headers], body)

    async def _fresh(self, request: Http1Request, agent: Agent, place: Place) -> bytes | None:
        """The present card of `agent`, rewritten; None when the request was answered with why not.

        A card that was known before is not served in its place.
        """
        data = None
        try:
            with trio.CancelScope(deadline=trio.current_time() + _DEADLINE_SECONDS):
                data = await agent.fresh_card()
            if data is not None:
                return self.rewrite(data, agent.name, place, header(request.headers, "host") or "")
            reason, text = "CARD_UNAVAILABLE", f"no card within {_DEADLINE_SECONDS:g} s"
            status = 504
        except Unavailable as error:
            reason, text = error.reason, str(error)
            # The agent is behind this sidecar: what is wrong with it is a gateway's error.
            status = 503 if reason == "AGENT_DISABLED" else 502
        except CardError as error:
            reason, text, status = "CARD_UNAVAILABLE", str(error), 502
        await self.refuse(request, errors.own(reason, text, agent=agent.name), status)
        return None

    async def refuse(
        self, request: Http1Request, record: ErrorRecord, status: int | None = None
    ) -> None:
        """Answer a GET for a card with an error; by default with the record's own status."""
        status = status or record.http_status
        headers: Headers = [("content-type", JSON_TYPE), ("cache-control", "no-store")]
        body = errors.http_error_body(record, status)
        await request.respond(status, [*headers, *record.headers], body)

    def rewrite(self, data: bytes, agent: str, place: Place, authority: str) -> bytes:
        """The card `data` of `agent` for a client that asked `place` under `authority`."""
        if not _AUTHORITY.fullmatch(authority):
            authority = ""
        served = [
            _served(one, agent, authority if one == place else "")
            for one in sorted(self._places, key=lambda one: one != place)  # that place first
            if one.agent in {None, agent}
        ]
        return rewrite_card(
            data,
            [one for one in served if one is not None],
            security_schemes=_TOKEN_SCHEME if place.asks_for_token else None,
        )

    def rewrite_answer(
        self, result: Result, call: Call, agent: str, place: Place, authority: str
    ) -> None:
        """Rewrite the extended card that `result` of `call` brings, in either form.

        One that cannot be read becomes an error.
        """
        answer = result.payload
        if answer is None:
            return
        data = answer.data
        try:
            if answer.form is Form.PROTO:
                data = convert.proto_to_json("AgentCard", data)
            data = self.rewrite(data, agent, place, authority)
            if answer.form is Form.PROTO:
                data = convert.json_to_proto("AgentCard", data)
        except (CardError, convert.InvalidMessage) as error:
            text = f"the agent's extended card cannot be read: {error}"
            result.payload = None
            result.outcome = failover.TABLE[Kind.AMBIGUOUS].counted
            result.error = errors.own(
                "DELIVERY_UNKNOWN", text, agent=agent, call=call.id, delivered="unknown"
            )
            return
        result.payload = Payload(answer.form, data)


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
