"""A whole card, checked against what listens: one row for everything that it declares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import trio

from sidecar.check import Declared, declared_interfaces, elsewhere_clause
from sidecar.core.addresses import reaches_loopback, same_host
from sidecar.core.card import BINDING_NAMES, version_number
from sidecar.core.card_json import as_object, member, shown_text
from sidecar.core.interface_url import UrlError, read_url, same_url
from sidecar.core.spec import GET_EXTENDED_CARD, GET_TASK, SUBSCRIBE_TO_TASK, Binding, Version
from sidecar.core.types import Interface
from sidecar.probe import (
    Finding,
    Level,
    Prober,
    Step,
    judge,
    judge_promise,
    judge_wrong_version,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    from sidecar.core.address_map import AddressMap
    from sidecar.core.spec import Operation
    from sidecar.core.types import Headers
    from sidecar.upstream import Ended
    from sidecar.wire.net import Dialer
    from sidecar.wire.tls import TlsIdentity

    Progress: TypeAlias = Callable[[int, int, str], None]

_GOODBYE_SECONDS = 1.0


class Verdict(IntEnum):
    """What a check came to; the number is the exit code."""

    SERVED = 0
    NOT_SERVED = 1
    UNKNOWN = 2

    @property
    def words(self) -> str:
        """For people and for JSON."""
        return self.name.lower().replace("_", " ")


def _worst(verdicts: list[Verdict]) -> Verdict:
    """A disproof outweighs doubt."""
    if Verdict.NOT_SERVED in verdicts:
        return Verdict.NOT_SERVED
    return max(verdicts, default=Verdict.SERVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One declaration and what was found."""

    declared: Declared
    findings: tuple[Finding, ...]
    served: frozenset[str] = frozenset()
    """Bindings that were proven at its url."""
    place: str = ""
    """``host:port`` that was dialled, '' when nothing was."""

    @property
    def verdict(self) -> Verdict:
        """The row's own."""
        levels = {finding.level for finding in self.findings}
        if Level.FAILED in levels:
            return Verdict.NOT_SERVED
        return Verdict.UNKNOWN if Level.UNKNOWN in levels else Verdict.SERVED

    @property
    def needs_credentials(self) -> bool:
        """Whether more would be known with credentials."""
        return any(finding.needs_credentials for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReport:
    """What a check of a card found."""

    name: str
    rows: tuple[Row, ...]
    problems: tuple[str, ...] = ()
    """What is wrong with the card as a whole."""

    @property
    def verdict(self) -> Verdict:
        """SERVED only when everything is."""
        verdicts = [row.verdict for row in self.rows]
        return _worst([*verdicts, *(Verdict.NOT_SERVED for _ in self.problems)])

    @property
    def reasons(self) -> list[str]:
        """A sentence for each thing that failed or is unknown."""
        return [
            *self.problems,
            *(
                f"{row.declared.where} ({row.declared.transport} {row.declared.shown}): {one.text}"
                for row in self.rows
                for one in row.findings
                if one.level in {Level.FAILED, Level.UNKNOWN}
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """How a card is checked."""

    addresses: AddressMap
    identity: TlsIdentity
    headers: Headers
    """Credentials. They go to the card's own host, to mapped addresses, and nowhere in plaintext."""
    card_host: str = ""
    """Where the card came from; '' for a file, whose interfaces are all trusted."""
    timeout_seconds: float = 5.0
    promises: bool = True
    """Look at version, streaming and extended card too."""


async def check_card(
    card: Mapping[str, Any],
    options: CheckOptions,
    dialer: Dialer,
    *,
    progress: Progress = lambda done, total, what: None,
) -> CardReport:
    """Probe everything that `card` (parsed JSON) declares; `progress` hears of each row's end."""
    declared = declared_interfaces(card)
    rows: dict[tuple[object, ...], Row] = {}
    unlike = {_key(one): one for one in reversed(declared)}
    async with trio.open_nursery() as connections:
        prober = Prober(connections, dialer, options.identity, options.timeout_seconds)
        check = _Check(card, options, prober)

        async def fill(key: tuple[object, ...], one: Declared) -> None:
            rows[key] = await check.row(one)
            progress(len(rows), len(unlike), f"{one.transport} {one.shown}")

        progress(0, len(unlike), "")
        async with trio.open_nursery() as nursery:
            for key, one in unlike.items():
                nursery.start_soon(fill, key, one)
        prober.close()
        connections.cancel_scope.deadline = trio.current_time() + _GOODBYE_SECONDS
    found = [replace(rows[_key(one)], declared=one) for one in declared]
    return CardReport(
        name=shown_text(member(dict(card), "name")),
        rows=tuple(_with_hint(row, found) for row in found),
        problems=() if declared else ("the card declares no interface",),
    )


def _key(one: Declared) -> tuple[object, ...]:
    return (one.transport, one.url, one.tenant, one.version)


def _with_hint(row: Row, rows: list[Row]) -> Row:
    """A failed hint says that it is one, and where it would have been right."""
    if not row.declared.is_hint or row.verdict is not Verdict.NOT_SERVED:
        return row
    transport = row.declared.transport
    others = [
        other
        for other in rows
        if other.declared.transport == transport
        and not same_url(other.declared.url, row.declared.url)
    ]
    right = [other.declared for other in others if transport in other.served]
    clause = elsewhere_clause(row.declared, right)
    if others and not right:
        names = " and ".join(other.declared.where for other in others)
        clause = f"; neither is it at {names}"
    findings = [
        replace(one, text=f"preferredTransport says {transport}, but {one.text}{clause}")
        if one.level is Level.FAILED
        else one
        for one in row.findings
    ]
    return replace(row, findings=tuple(findings))


class _Check:
    """The rows of one card."""

    def __init__(self, card: Mapping[str, Any], options: CheckOptions, prober: Prober) -> None:
        self._options = options
        self._prober = prober
        members = dict(card)
        capabilities = as_object(member(members, "capabilities"))
        self._streaming = member(capabilities, "streaming") is True
        self._extended = (
            member(capabilities, "extendedAgentCard") is True
            or member(members, "supportsAuthenticatedExtendedCard") is True
        )

    async def row(self, one: Declared) -> Row:
        binding = BINDING_NAMES.get(one.transport)
        cannot = _why_not_checked(one, binding)
        if cannot is not None or binding is None:
            return Row(declared=one, findings=(cannot,) if cannot else ())
        try:
            interface = _interface(one, binding)
        except UrlError as error:
            text = f"{binding} cannot be served at this url: {error}"
            served = await self._served_instead(one, binding)
            finding = Finding(Step.BINDING, Level.FAILED, text + _instead(served))
            return Row(declared=one, findings=(finding,), served=served)
        target = _Target(interface, self._options)
        found = judge(target.dialled, await target.call(self._prober))
        if found.level is Level.PASSED:
            findings = [*_proven(target), *await self._promises(target)]
            return Row(
                declared=one,
                findings=tuple(findings),
                served=frozenset({binding.value}),
                place=target.dialled.address,
            )
        served = frozenset[str]()
        if found.step is not Step.LISTENS and not found.needs_credentials:
            found, served = await self._explained(one, target, found)
        if found.needs_credentials and target.withheld:
            found = replace(found, text=f"{found.text}; {target.withheld}")
        return Row(declared=one, findings=(found,), served=served, place=target.dialled.address)

    # --- a row that is not simply served ------------------------------------------------------

    async def _explained(
        self, one: Declared, target: _Target, found: Finding
    ) -> tuple[Finding, frozenset[str]]:
        """More probes, to say what is wrong: the tenant, TLS, or the binding."""
        interface = target.interface
        if interface.tenant and found.level is Level.FAILED:
            without = _Target(replace(interface, tenant=""), self._options)
            if judge(without.dialled, await without.call(self._prober)).level is Level.PASSED:
                text = (
                    f"{interface.binding} is served at {target.dialled.address}, but not with the"
                    f" tenant {shown_text(interface.tenant)!r}"
                )
                return Finding(Step.TENANT, Level.FAILED, text), frozenset()
        if found.step is Step.TLS:
            return await self._explained_tls(target, found), frozenset()
        served = await self._served_instead(one, interface.binding)
        http2 = Binding.GRPC.value in served
        if found.level is Level.UNKNOWN and found.step is Step.BINDING and http2:
            # gRPC servers close connections that begin with anything but HTTP/2.
            text = f"{target.dialled.address} speaks HTTP/2, not HTTP/1.1"
            found = Finding(Step.BINDING, Level.FAILED, text)
        return replace(found, text=found.text + _instead(served)), served

    async def _explained_tls(self, target: _Target, found: Finding) -> Finding:
        plain = replace(target.dialled, tls=False)
        ended = await self._prober.call(plain, headers=[])
        if judge(plain, ended).level is not Level.PASSED:
            return found
        text = f"{found.text}; it answers {plain.binding} in plaintext, which the url does not say"
        return replace(found, text=text)

    async def _served_instead(self, one: Declared, binding: Binding) -> frozenset[str]:
        """The other bindings that are served at the url."""
        served = set()
        for other in Binding:
            if other is binding:
                continue
            try:
                interface = _interface(replace(one, url=_url_for(one.url, other)), other)
            except UrlError:
                continue
            target = _Target(interface, self._options)
            if judge(target.dialled, await target.call(self._prober)).level is Level.PASSED:
                served.add(other.value)
        return frozenset(served)

    # --- a row that is served: what more the card promises ------------------------------------

    async def _promises(self, target: _Target) -> list[Finding]:
        if not self._options.promises:
            return []
        findings = []
        ended = await target.call(self._prober, wrong_version=True)
        wrong = judge_wrong_version(ended)
        if wrong is not None:
            findings.append(wrong)
        if self._streaming:
            findings.append(await self._streams(target))
        if self._extended:
            ended = await target.call(self._prober, GET_EXTENDED_CARD)
            name = GET_EXTENDED_CARD.name
            findings.append(judge_promise(target.dialled, Step.EXTENDED_CARD, name, ended))
        return findings

    async def _streams(self, target: _Target) -> Finding:
        name = SUBSCRIBE_TO_TASK.name
        ended = await target.open_stream(self._prober, SUBSCRIBE_TO_TASK)
        if ended is None:
            text = f"{name} opened a stream for a task that does not exist"
            return Finding(Step.STREAMING, Level.NOTE, text)
        return judge_promise(target.dialled, Step.STREAMING, name, ended)


class _Target:
    """Where an interface is really dialled, and what is sent there."""

    def __init__(self, interface: Interface, options: CheckOptions) -> None:
        self.interface = interface
        self.dialled = options.addresses.locate(interface)
        mapped = self.dialled is not interface
        self.withheld = ""
        """Why no credentials are sent, '' when there are none or they are."""
        if options.headers and not mapped:
            self.withheld = _withheld(interface, options.card_host)
        self._headers = [] if self.withheld else options.headers
        self._server_name = interface.host if mapped else ""

    async def call(
        self, prober: Prober, operation: Operation = GET_TASK, *, wrong_version: bool = False
    ) -> Ended:
        """One unary probe."""
        return await prober.call(
            self.dialled,
            operation,
            headers=self._headers,
            server_name=self._server_name,
            wrong_version=wrong_version,
        )

    async def open_stream(self, prober: Prober, operation: Operation) -> Ended | None:
        """One probe of a stream."""
        return await prober.open_stream(
            self.dialled, operation, headers=self._headers, server_name=self._server_name
        )


def _withheld(interface: Interface, card_host: str) -> str:
    if card_host and not same_host(interface.host, card_host):
        return "credentials are sent to the card's own host only"
    if not interface.tls and not reaches_loopback(interface.host):
        return "credentials are not sent in plaintext"
    return ""


def _why_not_checked(one: Declared, binding: Binding | None) -> Finding | None:
    if not one.url or not one.transport:
        lack = "url" if not one.url else "transport"
        return Finding(Step.BINDING, Level.FAILED, f"there is no {lack}")
    if binding is None:
        text = f"{shown_text(one.transport)} is no binding of A2A 1.0: not checked"
        return Finding(Step.BINDING, Level.UNKNOWN, text)
    number = version_number(one.version or str(Version.V1_0))
    if number is None:
        text = f"{shown_text(one.version)!r} is not a protocol version"
        return Finding(Step.VERSION, Level.FAILED, text)
    if number != Version.V1_0.value:
        text = f"protocol version {shown_text(one.version)} is not checked, only {Version.V1_0}"
        return Finding(Step.VERSION, Level.UNKNOWN, text)
    return None


def _interface(one: Declared, binding: Binding) -> Interface:
    endpoint = read_url(one.url, binding)
    return Interface(
        position=0,
        binding=binding,
        version=Version.V1_0,
        url=one.url,
        tls=endpoint.tls,
        host=endpoint.host,
        port=endpoint.port,
        path=endpoint.path,
        tenant=one.tenant,
    )


def _url_for(url: str, binding: Binding) -> str:
    """`url` as an interface of another binding would be written, at the same host and port."""
    if "://" not in url:
        return url if binding is Binding.GRPC else f"https://{url}"
    scheme, _, _rest = url.partition("://")
    if binding is not Binding.GRPC:
        return url
    endpoint = read_url(url, Binding.HTTP_JSON)
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{scheme}://{host}:{endpoint.port}"


def _proven(target: _Target) -> list[Finding]:
    dialled = target.dialled
    steps = [(Step.LISTENS, f"{dialled.address} takes connections")]
    if dialled.tls:
        steps.append((Step.TLS, f"its certificate is valid for {target.interface.host}"))
    steps += [
        (Step.BINDING, f"{dialled.binding} is spoken"),
        (Step.HANDLER, "GetTask is answered"),
        (Step.VERSION, f"version {dialled.version} is accepted"),
    ]
    if dialled.tenant:
        steps.append((Step.TENANT, f"tenant {shown_text(dialled.tenant)!r} is accepted"))
    return [Finding(step, Level.PASSED, text) for step, text in steps]


def _instead(served: frozenset[str]) -> str:
    return f"; served there: {', '.join(sorted(served))}" if served else ""
