"""Single values of the configuration: text -> address, host, card, file, each with its mend.

Every function raises ValueError with a sentence that can be shown as it is. Values that may hold
a secret by mistake (URLs) are never repeated in one.
"""

import difflib
import ipaddress
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from pydantic import ValidationInfo

from sidecar.core.address_map import AddressMap
from sidecar.core.spec import Binding

RESERVED_NAMES: frozenset[str] = frozenset({"agents", "tasks", "card", "other", "localhost"})
"""Names that would be mistaken for a path, a host or a metric label."""

_AGENT_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CREDENTIAL = re.compile(r"[A-Za-z0-9_.-]+")
_DESCRIPTOR_NAME = re.compile(r"[!-9;-~]{1,255}")
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(?P<port>[0-9]{1,5}))?")
_HEADER = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PER_HOP_HEADERS = frozenset(
    {
        "connection", "content-length", "content-type", "host", "keep-alive", "te", "trailer",
        "transfer-encoding", "upgrade", "accept", "accept-encoding", "expect", "cookie",
    }
)  # fmt: skip
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_-]+)*")
_HOST_PORT = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_UNIX_PATH_BYTES = 107
"""sun_path has 108 bytes, one of them for the closing NUL (unix(7))."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """An IP address and port; port 0 lets the system choose one."""

    host: str
    """An IP literal without brackets."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket at an absolute path."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class SystemdAddress:
    """A listening socket that systemd passes, by its FileDescriptorName."""

    name: str

    def __str__(self) -> str:
        return f"systemd:{self.name}"


Address: TypeAlias = TcpAddress | UnixAddress | SystemdAddress


@dataclass(frozen=True, slots=True)
class SecretRef:
    """Where a secret is: in a file, a variable of the environment, or a systemd credential."""

    scheme: Literal["file", "env", "credential"]
    name: str

    def __str__(self) -> str:
        return f"{self.scheme}:{self.name}"


# --- words for messages -----------------------------------------------------------------------


def shown(value: object) -> str:
    """A value as a message shows it: short, on one line, in the words of TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value if len(value) <= 80 else value[:80] + "…", ensure_ascii=False)
        case int():
            text = str(value)
            return text if len(text) <= 80 else text[:80] + "…"
        case float():
            return f"{value:.12g}"
        case list():
            return "an array"
        case dict():
            return "a table"
        case _:
            return "a date or time"


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?``, or '' when nothing is near."""
    names = list(known)
    lowered = [name.lower() for name in names]
    found = difflib.get_close_matches(word.lower(), lowered, n=1)
    return f"; did you mean {names[lowered.index(found[0])]}?" if found else ""


def one_of(value: object, known: Iterable[str]) -> str:
    """What to say of a value that is none of the `known` words."""
    names = list(known)
    listed = ", ".join(shown(name) for name in names)
    mend = nearest(value, names) if isinstance(value, str) else ""
    return f"must be one of {listed}, not {shown(value)}{mend}"


def _text(value: object) -> str:
    if not isinstance(value, str):
        msg = f"must be a string, not {shown(value)}"
        raise ValueError(msg)
    return value


# --- addresses --------------------------------------------------------------------------------


def parse_address(text: str) -> Address:
    """``127.0.0.1:7420``, ``[::1]:7420``, ``localhost:7420``, ``unix:/path``, ``systemd:name``."""
    if text.startswith("unix:"):
        return _unix(text.removeprefix("unix:"))
    if text.startswith("systemd:"):
        name = text.removeprefix("systemd:")
        if _DESCRIPTOR_NAME.fullmatch(name) is None:
            msg = f"{shown(name)} is not a FileDescriptorName of a socket unit"
            raise ValueError(msg)
        return SystemdAddress(name)
    found = _HOST_PORT.fullmatch(text)
    if found is None:
        msg = f'must be HOST:PORT, "unix:/PATH" or "systemd:NAME", not {shown(text)}'
        if text.count(":") > 1 and "[" not in text:
            msg += "; an IPv6 address needs brackets, as [::1]:7420"
        raise ValueError(msg)
    port = int(found["port"])
    if port > 65535:
        msg = f"port {port} is above 65535"
        raise ValueError(msg)
    if found["v6"] is not None:
        return TcpAddress(_literal(found["v6"], version=6), port)
    return TcpAddress(_literal(found["host"], version=4), port)


def _unix(path: str) -> UnixAddress:
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        msg = f"a Unix socket needs the absolute path of a file, not {shown(path)}"
        raise ValueError(msg)
    path = os.path.normpath(path)
    size = len(os.fsencode(path))
    if size > _UNIX_PATH_BYTES:
        msg = f"the path of a Unix socket has at most {_UNIX_PATH_BYTES} bytes, this one has {size}"
        raise ValueError(msg)
    return UnixAddress(path)


def _literal(host: str, *, version: int) -> str:
    if version == 4 and host.lower() == "localhost":
        # One socket, and the same one whatever the resolver makes of the name.
        return "127.0.0.1"
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        literal = None
    if literal is None or literal.version != version or "%" in host:
        msg = f"{shown(host)} is not an address; use 127.0.0.1, [::1] or localhost"
        raise ValueError(msg)
    return str(literal)


def is_loopback(address: Address) -> bool:
    """Whether only this machine reaches a TCP address."""
    return isinstance(address, TcpAddress) and ipaddress.ip_address(address.host).is_loopback


def address(value: object) -> Address:
    """A parsed address as it is, or the text of one."""
    return value if isinstance(value, Address) else parse_address(_text(value))


def tcp_address(value: object) -> TcpAddress:
    """A loopback TCP address."""
    parsed = address(value)
    if not isinstance(parsed, TcpAddress):
        msg = "must be HOST:PORT, nothing else is possible here"
        raise ValueError(msg)
    if not is_loopback(parsed):
        msg = f"{shown(parsed.host)} is not a loopback address; use 127.0.0.1, [::1] or localhost"
        raise ValueError(msg)
    return parsed


def authority(value: object) -> str:
    """``HOST`` or ``HOST:PORT`` as it shall stand in cards."""
    text = _text(value)
    found = _AUTHORITY.fullmatch(text)
    if found is None or int(found["port"] or 1) not in range(1, 65536):
        msg = f"must be HOST or HOST:PORT, not {shown(text)}"
        raise ValueError(msg)
    host(found["host"])
    return text


def address_map(value: object) -> Mapping[str, str]:
    """Public addresses and where they are really found."""
    if not isinstance(value, Mapping):
        msg = f"must be a table, not {shown(value)}"
        raise ValueError(msg)
    entries = {_text(public): _text(local) for public, local in value.items()}
    AddressMap(entries)
    return MappingProxyType(entries)


def mode(value: object) -> int:
    """Permissions from their octal text."""
    if not isinstance(value, str) or re.fullmatch(r"0?[0-7]{3}", value) is None:
        msg = f'must be a string of octal digits as "0660", not {shown(value)}'
        raise ValueError(msg)
    return int(value, 8)


# --- names ------------------------------------------------------------------------------------


def binding(value: object) -> Binding:
    """A binding by the name it has in cards."""
    text = _text(value)
    known = {str(one): one for one in Binding}
    if text not in known:
        raise ValueError(one_of(text, known))
    return known[text]


def host(value: object) -> str:
    """A host name in lower case, or an IP literal without brackets."""
    text = _text(value).lower().removesuffix(".")
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return str(ipaddress.ip_address(inner))
    except ValueError:
        pass
    if _HOST_NAME.fullmatch(text) is None:
        msg = f"must be a host alone, without scheme, port or path, not {shown(value)}"
        raise ValueError(msg)
    return text


def secret(value: object, info: ValidationInfo) -> SecretRef:
    """A reference to a secret; a secret itself is refused without being shown."""
    if isinstance(value, SecretRef):
        return value
    scheme, colon, name = _text(value).partition(":")
    if not colon or scheme not in ("file", "env", "credential"):
        msg = "must be file:PATH, env:NAME or credential:NAME; secrets do not belong into this file"
        raise ValueError(msg)
    match scheme:
        case "file":
            return SecretRef("file", str(existing_file(name, info)))
        case "env":
            pattern, kind = _VARIABLE, "a variable's name"
        case _:
            pattern, kind = _CREDENTIAL, "a credential's name"
    if pattern.fullmatch(name) is None:
        msg = f"{shown(name)} is not {kind}"
        raise ValueError(msg)
    return SecretRef("env" if scheme == "env" else "credential", name)


def header_name(name: str) -> str:
    """A header that may be set; those that belong to a connection are not configurable."""
    lower = name.lower()
    if _HEADER.fullmatch(name) is None:
        msg = f"{shown(name)} is not a header's name"
        raise ValueError(msg)
    if lower in _PER_HOP_HEADERS or lower.startswith(("a2a-", "grpc-")):
        msg = f"the header {shown(name)} is set by the sidecar itself"
        raise ValueError(msg)
    return lower


def http_url(value: object) -> str:
    """An absolute http(s) URL without credentials."""
    text = _text(value)
    if not text.isprintable() or not text.lower().startswith(("http://", "https://")):
        msg = f"must be an http:// or https:// URL, not {shown(value)}"
        raise ValueError(msg)
    _check_url(text)
    return text


def proxy(value: object) -> str:
    """``http://HOST:PORT`` of a proxy for CONNECT."""
    text = http_url(value)
    parts = urlsplit(text)
    if parts.scheme.lower() != "http" or parts.port is None or parts.path not in {"", "/"}:
        msg = "must be http://HOST:PORT"
        raise ValueError(msg)
    return text


def agent_name(name: str) -> str:
    """A name that is safe as a path segment, a host label and a metric label."""
    if name in RESERVED_NAMES:
        msg = f"the name {shown(name)} is reserved"
    elif _AGENT_NAME.fullmatch(name) is None or len(name) > 63:
        msg = (
            "an agent's name is made of a-z, 0-9 and single dashes between them,"
            " at most 63 characters"
        )
    elif not re.search("[a-z]", name):
        msg = "an agent's name needs a letter"
    else:
        return name
    raise ValueError(msg)


# --- files and cards --------------------------------------------------------------------------


def existing_file(value: object, info: ValidationInfo) -> Path:
    """The absolute path of a file that is there; relative ones start at the context's directory."""
    text = os.fspath(value) if isinstance(value, Path) else _text(value)
    base = info.context if isinstance(info.context, Path) else Path.cwd()
    path = Path(os.path.normpath(base / text))
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        msg = f"file {shown(str(path))}: {error.strerror}"
        raise ValueError(msg) from None
    if is_directory:
        msg = f"file {shown(str(path))}: Is a directory"
        raise ValueError(msg)
    return path


def verification(value: object, info: ValidationInfo) -> bool | Path:
    """Whether signatures are verified, or the file with the keys that may have made them."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str | Path):
        msg = f"must be true, false or a file with public keys, not {shown(value)}"
        raise ValueError(msg)
    return existing_file(value, info)


def sha256(value: object) -> str:
    """The SHA-256 of a file as `sha256sum` prints it."""
    text = _text(value).lower()
    if re.fullmatch(r"[0-9a-f]{64}", text) is None:
        msg = f"must be 64 hexadecimal digits, not {shown(value)}"
        raise ValueError(msg)
    return text


def card(value: object, info: ValidationInfo) -> str:
    """An http(s) URL as written, or the absolute path of an existing file."""
    text = _text(value)
    if not text or not text.isprintable():
        msg = "must be an http:// or https:// URL, a file: URL or a path"
        raise ValueError(msg)
    if text.lower().startswith("file:"):
        return str(existing_file(_file_url_path(text), info))
    if _SCHEME.match(text):
        _check_url(text)
        return text
    try:
        return str(existing_file(text, info))
    except ValueError as error:
        msg = f"{error} (a URL begins with http:// or https://)"
        raise ValueError(msg) from None


def _file_url_path(text: str) -> str:
    parts = urlsplit(text)
    if parts.netloc.lower() not in {"", "localhost"} or parts.query or parts.fragment:
        msg = "a file: URL is file:///PATH, without host, query and fragment"
        raise ValueError(msg)
    if not parts.path.startswith("/"):
        msg = "a file: URL needs an absolute path; write a relative one without file:"
        raise ValueError(msg)
    return unquote(parts.path)


def _check_url(text: str) -> None:
    # The authority by hand: urlsplit refuses some that hold credentials, and says them aloud.
    scheme, _, rest = text.partition("://")
    if "@" in re.split(r"[/?#\\]", rest, maxsplit=1)[0]:
        msg = "a URL with credentials in it is not accepted"
        raise ValueError(msg)
    if scheme.lower() not in {"http", "https"}:
        msg = f"a card cannot be fetched over {shown(scheme)}; use http, https or file"
        raise ValueError(msg)
    try:
        parts = urlsplit(text)
        usable = bool(parts.hostname) and parts.port != 0 and not re.search(r"[ \\]", text)
    except ValueError:
        usable, parts = False, None
    if parts is None or not usable:
        msg = "is not a valid URL"
        raise ValueError(msg)
    if parts.fragment:
        msg = "a URL with a fragment (#...) is not accepted"
        raise ValueError(msg)
