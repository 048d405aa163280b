"""Where a public address is really found: an agent behind a reverse proxy, looked at from inside.

An entry maps a public address, ``https://agent.example``, ``https://agent.example/a2a`` or
``agent.example:443``, to a local one, ``http://127.0.0.1:8000`` or ``127.0.0.1:8000``. A local
address without scheme is dialled as the public one is, over TLS or not. Of a public address with a
path the interfaces below that path are meant, and the local path takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sidecar.core.interface_url import UrlError, read_url
from sidecar.core.spec import Binding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.core.types import Interface


@dataclass(frozen=True, slots=True)
class _Place:
    host: str
    port: int
    tls: bool | None
    """None: not said."""
    path: str


class AddressMap:
    """The entries of one map, the longest matching path first."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        """`entries` is public address → local address; ValueError says which one is not valid."""
        read = [(_place(public), _place(local)) for public, local in entries.items()]
        self._entries = sorted(read, key=lambda entry: -len(entry[0].path))

    def locate(self, interface: Interface) -> Interface:
        """`interface` with the host, port, TLS and path under which it is dialled."""
        for public, local in self._entries:
            if (public.host, public.port) != (interface.host, interface.port):
                continue
            rest = _below(interface.path, public.path)
            if rest is None:
                continue
            if interface.binding is Binding.GRPC:
                path = ""
            elif interface.binding is Binding.JSONRPC:
                path = local.path + rest or "/"
            else:
                path = local.path + rest
            return replace(
                interface,
                host=local.host,
                port=local.port,
                tls=interface.tls if local.tls is None else local.tls,
                path=path,
            )
        return interface


def _place(text: str) -> _Place:
    try:
        if "://" in text:
            found = read_url(text, Binding.HTTP_JSON)
            return _Place(found.host, found.port, found.tls, found.path)
        found = read_url(text, Binding.GRPC)
    except UrlError:
        form = "write HOST:PORT or http[s]://HOST[:PORT][/PATH]"
        raise ValueError(f"{text!r} is not an address: {form}") from None
    return _Place(found.host, found.port, None, "")


def _below(path: str, prefix: str) -> str | None:
    """What of `path` comes after `prefix`, whole segments; None when it is not below it."""
    if not prefix:
        return path
    if path == prefix or path.startswith(prefix + "/"):
        return path[len(prefix) :]
    return None
