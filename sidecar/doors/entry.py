"""Who may come in through one listener: browser attacks, loops, the local token."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.core import door, errors
from sidecar.core.types import header
from sidecar.credentials import CredentialsUnavailable

if TYPE_CHECKING:
    from sidecar.core.types import ErrorRecord, Headers
    from sidecar.credentials import Secret

_TOKEN_HEADER = "a2a-sidecar-token"  # noqa: S105 - a header's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The rules of one listener."""

    over_tcp: bool
    hosts: frozenset[str]
    """Names under which it may be asked, besides those of loopback."""
    token: Secret | None
    pseudonym: str
    """What this sidecar calls itself in ``Via``; drawn at start."""

    def admit(self, headers: Headers, host: str) -> ErrorRecord | None:
        """The refusal of a request, before it is known what it wants; None: go on.

        `host` is the request's Host or ``:authority``.
        """
        if self.over_tcp:
            forbidden = door.admit(headers, host, hosts=self.hosts)
            if forbidden is not None:
                return forbidden
        via = ",".join(value for name, value in headers if name == "via")
        if self.pseudonym in via:
            return errors.own("LOOP", "the request has been through this sidecar already")
        return None

    def authenticate(self, headers: Headers) -> tuple[ErrorRecord | None, frozenset[str]]:
        """The refusal of a caller without the token, and the header that carried it.

        That header was meant for the sidecar and goes no further.
        """
        if self.token is None:
            return None, frozenset((_TOKEN_HEADER,))
        try:
            expected = self.token.read().encode()
        except CredentialsUnavailable:
            return errors.own("LOCAL_TOKEN", "the sidecar cannot read its own token"), frozenset()
        shown = header(headers, _TOKEN_HEADER)
        carrier = _TOKEN_HEADER
        if shown is None:
            scheme, _, shown = (header(headers, "authorization") or "").partition(" ")
            carrier = "authorization"
            if scheme.lower() != "bearer":
                shown = ""
        if not hmac.compare_digest(shown.strip().encode(), expected):
            refused = errors.own(
                "LOCAL_TOKEN",
                "this listener asks for its token: a2a-sidecar-token, or Authorization: Bearer",
                headers=[("www-authenticate", 'Bearer realm="a2a-sidecar"')],
            )
            return refused, frozenset()
        return None, frozenset((carrier,))
