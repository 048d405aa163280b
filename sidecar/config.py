"""The configuration: TOML text -> one frozen `Config`, or every mistake in it at once.

Relative file names start at the directory of the file, those of the command line at the working
directory. A key that is not in the models is an error: nothing is accepted and then ignored.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import tomli
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sidecar import config_values as values
from sidecar.config_tables import (
    AdminConfig,
    AgentConfig,
    AuthConfig,
    Config,
    Limits,
    ListenerConfig,
    LogConfig,
    OAuthConfig,
    PublishConfig,
    Table,
    TlsConfig,
)
from sidecar.config_values import (
    Address,
    SecretRef,
    SystemdAddress,
    TcpAddress,
    UnixAddress,
    nearest,
    one_of,
    parse_address,
    shown,
)
from sidecar.core.addresses import names_host, reaches_loopback
from sidecar.toml_lines import KeyPath, line_of, locate

__all__ = [
    "Address",
    "AdminConfig",
    "AgentConfig",
    "AuthConfig",
    "Config",
    "ConfigError",
    "Limits",
    "ListenerConfig",
    "LogConfig",
    "OAuthConfig",
    "Problem",
    "PublishConfig",
    "SecretRef",
    "SystemdAddress",
    "TcpAddress",
    "TlsConfig",
    "UnixAddress",
    "effective",
    "from_agents",
    "load",
    "parse_address",
    "schema",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake."""

    key: str
    """Path of the key, as ``agents.weather.card``; '' for the file as a whole."""
    line: int | None
    """Line in the file, counted from 1; None when there is no file or no such place."""
    message: str
    """What is wrong, and the mend where it is known."""


class ConfigError(Exception):
    """A configuration that cannot be used; its text is the printable list of all `problems`."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = []
        for problem in self.problems:
            place = source if problem.line is None else f"{source}:{problem.line}"
            key = f"{problem.key}: " if problem.key else ""
            lines.append(f"{place}: {key}{problem.message}")
        super().__init__("\n".join(lines))


# --- reading ----------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> Config:
    """The configuration in the file at `path`; raises `ConfigError` with every mistake."""
    source = os.fspath(path)
    text = _read(source)
    try:
        # Editors of some systems begin a file with a byte order mark.
        text = text.removeprefix("\ufeff")
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        problem = Problem(key="", line=error.lineno, message=f"not valid TOML: {error.msg}")
        raise ConfigError(source, [problem]) from None
    except (RecursionError, ValueError) as error:
        # The parser lets through what Python says of numbers with thousands of digits.
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        problem = Problem(key="", line=None, message=f"not valid TOML: {reason}")
        raise ConfigError(source, [problem]) from None
    config, mistakes = _validate(data, Path(source).absolute().parent)
    if config is None or mistakes:
        lines = locate(text)
        found = [
            Problem(key=_key(place), line=line_of(lines, place), message=message)
            for place, message in mistakes
        ]
        raise ConfigError(source, sorted(found, key=lambda problem: problem.line or 0))
    return config


def _read(source: str) -> str:
    try:
        raw = Path(source).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = Problem(key="", line=None, message=f"cannot be read: {reason}")
        raise ConfigError(source, [problem]) from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = Problem(key="", line=line, message="not UTF-8 text")
        raise ConfigError(source, [problem]) from None


def from_agents(specs: Sequence[str]) -> Config:
    """A configuration from ``NAME=CARD`` arguments alone, the rest as by default.

    Raises `ConfigError` with every mistake, each with ``--agent NAME=CARD`` as its place.
    """
    agents: dict[str, dict[str, str]] = {}
    problems: list[Problem] = []
    for spec in specs:
        name, equals, card = spec.partition("=")
        if not equals:
            message = f"{shown(spec)} must be NAME=CARD_URL"
            problems.append(Problem(key="", line=None, message=message))
        elif name in agents:
            problems.append(Problem(key=_key(("agents", name)), line=None, message="given twice"))
        else:
            agents[name] = {"card": card}
    config, mistakes = _validate({"agents": agents}, Path.cwd())
    problems += [Problem(key=_key(place), line=None, message=text) for place, text in mistakes]
    if config is None or problems:
        source = "--agent"
        raise ConfigError(source, problems)
    return config


def _validate(data: dict[str, Any], base: Path) -> tuple[Config | None, list[tuple[KeyPath, str]]]:
    mistakes: list[tuple[KeyPath, str]] = []
    config = None
    try:
        config = Config.model_validate(data, context=base)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            place = tuple(part for part in detail["loc"] if part != "[key]")
            mistakes.append((place, _message(place, detail)))
    mistakes += _combinations(data)
    return config, mistakes


def _key(path: KeyPath) -> str:
    """``agents.weather.prefer[1]``: names that TOML would quote are quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        bare = part.isascii() and part.replace("-", "").replace("_", "").isalnum()
        text += ("." if text else "") + (part if bare else shown(part))
    return text


# --- mistakes ---------------------------------------------------------------------------------


def _message(place: KeyPath, detail: ErrorDetails) -> str:
    """The validator's finding in the words of the file."""
    context, value = detail.get("ctx", {}), detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return _unknown(place)
        case "missing":
            return "is required"
        case "value_error":
            return str(context["error"])
        case "bool_type":
            return f"must be true or false, not {shown(value)}"
        case "string_type":
            return f"must be a string, not {shown(value)}"
        case "int_type" | "int_from_float" | "int_parsing_size":
            return f"must be a whole number, not {shown(value)}"
        case "float_type" | "finite_number":
            return f"must be a number, not {shown(value)}"
        case "greater_than_equal":
            return f"must be at least {context['ge']:.12g}, not {shown(value)}"
        case "less_than_equal":
            return f"must be at most {context['le']:.12g}, not {shown(value)}"
        case "tuple_type":
            mend = "; write [[listeners]]" if place == ("listeners",) else ""
            return f"must be an array, not {shown(value)}{mend}"
        case "model_type" | "dict_type":
            return f"must be a table, not {shown(value)}"
        case "literal_error":
            annotation = _table_at(place[:-1]).model_fields[str(place[-1])].annotation
            return one_of(value, get_args(annotation))
        case _:
            return detail["msg"]


def _table_at(place: KeyPath) -> type[Table]:
    match place:
        case ("listeners", _):
            return ListenerConfig
        case ("admin",):
            return AdminConfig
        case ("agents", _):
            return AgentConfig
        case ("publish", _):
            return PublishConfig
        case ("agents" | "publish", _, "tls"):
            return TlsConfig
        case ("agents" | "publish", _, "auth" | "discovery_auth"):
            return AuthConfig
        case ("agents" | "publish", _, _, "oauth"):
            return OAuthConfig
        case ("limits",):
            return Limits
        case ("log",):
            return LogConfig
        case _:
            return Config


def _unknown(place: KeyPath) -> str:
    known = list(_table_at(place[:-1]).model_fields)
    return "unknown key" + (nearest(str(place[-1]), known) or f"; known here: {', '.join(known)}")


def _combinations(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Mistakes between keys. What is wrong by itself is passed over: the models tell of it."""
    agents = _table(data.get("agents"))
    yield from _listener_mistakes(data, agents)
    for kind in ("agents", "publish"):
        for name, agent in _table(data.get(kind)).items():
            yield from (((kind, name, *key), text) for key, text in _peer_mistakes(_table(agent)))
    limits = _table(data.get("limits"))
    keepalive, stall = (
        limits.get(key, Limits.model_fields[key].default)
        for key in ("keepalive_seconds", "stall_seconds")
    )
    if _is_number(keepalive) and _is_number(stall) and keepalive >= stall:
        key = "keepalive_seconds" if "keepalive_seconds" in limits else "stall_seconds"
        message = f"keepalive_seconds ({shown(keepalive)}) must be below"
        message += f" stall_seconds ({shown(stall)})"
        yield ("limits", key), message


def _peer_mistakes(peer: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """What does not go together in how an agent is reached."""
    tls = _table(peer.get("tls"))
    pair = ("client_cert_file", "client_key_file")
    for one, other in (pair, pair[::-1]):
        if one in tls and other not in tls:
            yield ("tls", one), f"needs {other} beside it"
    for key in ("auth", "discovery_auth"):
        auth = _table(peer.get(key))
        if "bearer" in auth and "oauth" in auth:
            yield (key, "bearer"), "and oauth exclude each other"
        for name in _table(auth.get("headers")):
            made = next((one for one in ("bearer", "oauth") if one in auth), None)
            if name.lower() == "authorization" and made:
                yield (key, "headers", name), f"and {made} exclude each other"
        token_url = _table(auth.get("oauth")).get("token_url")
        yield from (((key, "oauth", "token_url"), text) for text in _in_plaintext(token_url, peer))
    if _table(peer.get("discovery_auth")):
        yield from ((("card",), text) for text in _in_plaintext(peer.get("card"), peer))


def _in_plaintext(url: object, peer: dict[str, Any]) -> Iterator[str]:
    """What is wrong with credentials that are sent to `url`."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        host = (parts.hostname or "") if parts and parts.scheme == "http" else ""
    except ValueError:
        return
    trusted = peer.get("trusted_hosts")
    trusted = trusted if isinstance(trusted, list) else []
    known = frozenset(one for one in trusted if isinstance(one, str))
    if host and not reaches_loopback(host) and not names_host(known, host):
        yield (
            f"credentials would go to {shown(host)} in plaintext: use https, or name the host in"
            " trusted_hosts"
        )


def _listener_mistakes(
    data: dict[str, Any], agents: dict[str, Any]
) -> Iterator[tuple[KeyPath, str]]:
    listeners = data.get("listeners", [{"address": "127.0.0.1:7420"}])
    if not isinstance(listeners, list):
        return
    if not listeners:
        yield ("listeners",), "at least one is needed; without the key there is a default one"
    admin = _table(data.get("admin")).get("address", "127.0.0.1:7429")
    taken = {_fixed_address(admin): "[admin]"}
    for position, listener in enumerate(map(_table, listeners)):
        place = ("listeners", position)
        address = _fixed_address(listener.get("address"))
        if address is not None and address in taken:
            yield (*place, "address"), f"{taken[address]} has this address already"
        taken.setdefault(address, _key(place))
        yield from (((*place, key), text) for key, text in _door_mistakes(listener))
        agent = listener.get("agent")
        if isinstance(agent, str) and agent not in agents:
            mend = nearest(agent, agents)
            yield (*place, "agent"), f"no agent {shown(agent)} is configured{mend}"


def _door_mistakes(listener: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What does not go together in one listener."""
    text = str(listener.get("address"))
    if not text.startswith("unix:"):
        if "mode" in listener:
            yield "mode", "only a Unix socket has a mode"
        for key in ("allow_uids", "allow_gids"):
            if key in listener and not text.startswith("systemd:"):
                yield key, "only a Unix socket tells who its callers are"
    pair = ("tls_cert_file", "tls_key_file")
    for one, other in (pair, pair[::-1]):
        if one in listener and other not in listener:
            yield one, f"needs {other} beside it"
    try:
        address = parse_address(text)
    except ValueError:
        return
    if not isinstance(address, TcpAddress) or values.is_loopback(address):
        return
    if listener.get("allow_remote") is not True:
        yield (
            "address",
            (
                f"{shown(address.host)} is not a loopback address: other machines could call; that"
                " needs allow_remote = true, token and tls_cert_file"
            ),
        )
        return
    for key in ("token", "tls_cert_file"):
        if key not in listener:
            yield "allow_remote", f"needs {key}"


def _fixed_address(value: object) -> Address | None:
    """The address that `value` names, None for none or one that the system chooses."""
    try:
        address = values.address(value)
    except ValueError:
        return None
    return None if isinstance(address, TcpAddress) and address.port == 0 else address


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- writing ----------------------------------------------------------------------------------


def effective(config: Config) -> str:
    """The configuration with every default filled in, as TOML that `load` takes."""
    plain = config.model_dump(mode="json", exclude_none=True)
    blocks = []
    for listener in plain["listeners"]:
        if not listener["address"].startswith("unix:"):
            del listener["mode"]
        for key in ("allow_uids", "allow_gids", "allowed_hosts"):
            if not listener[key]:
                del listener[key]
        blocks.append(_block("[[listeners]]", listener))
    blocks.append(_block("[admin]", plain["admin"]))
    for kind in ("agents", "publish"):
        for name, peer in plain[kind].items():
            blocks += _peer_blocks(f"{kind}.{name}", peer)
    blocks += [_block(f"[{name}]", plain[name]) for name in ("limits", "log")]
    return "\n".join(blocks)


def _peer_blocks(place: str, peer: dict[str, Any]) -> Iterator[str]:
    tables = {key: peer.pop(key) for key in ("tls", "auth", "discovery_auth", "map") if key in peer}
    yield _block(f"[{place}]", peer)
    for key, table in tables.items():
        inner = {one: table.pop(one) for one in ("headers", "oauth") if table.get(one)}
        table.pop("headers", None)
        if table:
            yield _block(f"[{place}.{key}]", table)
        for one, value in inner.items():
            yield _block(f"[{place}.{key}.{one}]", value)


def _block(header: str, keys: dict[str, object]) -> str:
    # JSON and TOML write these values alike, but for the one control that JSON leaves as it is.
    lines = [
        f"{_bare_or_quoted(key)} = {json.dumps(value, ensure_ascii=False)}\n".replace(
            "\x7f", "\\u007f"
        )
        for key, value in keys.items()
    ]
    return f"{header}\n{''.join(lines)}"


def _bare_or_quoted(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def schema() -> dict[str, Any]:
    """JSON Schema of the file, for editors."""
    return Config.model_json_schema()
