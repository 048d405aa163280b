"""``a2a-sidecar check-card``: is everything that a card declares backed by what listens?

Exit code 0: all of it is served; 1: something is not; 2: something is unknown, or the check could
not run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

import trio

from sidecar.card_check import CheckOptions, Verdict, check_card
from sidecar.config import AgentConfig, AuthConfig
from sidecar.core.address_map import AddressMap
from sidecar.core.addresses import reaches_loopback
from sidecar.core.card import CardError
from sidecar.core.card_json import load_object
from sidecar.credentials import CredentialsUnavailable, Secret
from sidecar.discovery import CardFetchError, CardSource, resolve_source
from sidecar.logs import Log
from sidecar.probe import Level
from sidecar.wire.fetch import client
from sidecar.wire.net import Dialer
from sidecar.wire.tls import TlsIdentity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.card_check import CardReport, Progress
    from sidecar.core.types import Headers
    from sidecar.discovery import FetchedCard
    from sidecar.probe import Finding

_STALL_SECONDS = 10.0
_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 2.0
_VERDICT_WORDS = {
    Verdict.SERVED: "served",
    Verdict.NOT_SERVED: "NOT SERVED",
    Verdict.UNKNOWN: "unknown",
}
_COLOURS = {Verdict.SERVED: "32", Verdict.NOT_SERVED: "31", Verdict.UNKNOWN: "33"}


class CheckError(Exception):
    """The check cannot run; the text says why."""


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What the command line asks for."""

    source: str
    """A card's URL, the base URL of an agent, or a file."""
    as_json: bool = False
    junit: str = ""
    """A file to write, '' for none."""
    addresses: Sequence[str] = ()
    """``PUBLIC=LOCAL`` each."""
    headers: Sequence[str] = ()
    """``NAME=SECRETREF`` each."""
    timeout_seconds: float = 5.0
    wait_seconds: float = 0.0
    """How long an agent may take to be as its card says."""
    ca_file: str = ""


@dataclass(frozen=True, kw_only=True)
class _Checked:
    source: str
    report: CardReport
    notes: list[str] = field(default_factory=list)


def run(request: CheckRequest) -> int:
    """Check, print and return the exit code."""
    screen = _Screen(sys.stderr)
    try:
        options, addresses = _options(request)
        checked = trio.run(_wait_for_service, request, options, addresses, screen.show)
    except CheckError as error:
        screen.clear()
        sys.stderr.write(f"a2a-sidecar check-card: {error}\n")
        return int(Verdict.UNKNOWN)
    screen.clear()
    if request.junit:
        try:
            Path(request.junit).write_bytes(as_junit(checked.report, checked.source))
        except OSError as error:
            sys.stderr.write(f"a2a-sidecar check-card: {request.junit}: {error.strerror}\n")
            return int(Verdict.UNKNOWN)
    if request.as_json:
        text = json.dumps(as_data(checked.report, checked.source), indent=2, ensure_ascii=False)
    else:
        text = as_table(checked.report, checked.source, colour=sys.stdout.isatty())
    sys.stdout.write(text + "\n")
    return int(checked.report.verdict)


# --- running ------------------------------------------------------------------------------------


def _options(request: CheckRequest) -> tuple[AuthConfig, AddressMap]:
    try:
        auth = AuthConfig.model_validate(
            {"headers": dict(_pair(spec, "--header NAME=SECRETREF") for spec in request.headers)},
            context=Path.cwd(),
        )
    except ValueError as error:
        raise CheckError(f"--header: {_mistake(error)}") from None
    try:
        addresses = AddressMap(
            dict(_pair(spec, "--map PUBLIC=LOCAL") for spec in request.addresses)
        )
    except ValueError as error:
        raise CheckError(f"--map: {error}") from None
    return auth, addresses


def _pair(spec: str, form: str) -> tuple[str, str]:
    name, equals, value = spec.partition("=")
    if not (name and equals and value):
        raise CheckError(f"{form} is the form, not {spec.partition('=')[0]!r}")
    return name, value


def _mistake(error: ValueError) -> str:
    """The first mistake that a model found, without the values, which may be secrets."""
    found: list[dict[str, Any]] = getattr(error, "errors", list)()
    if not found:
        return str(error)
    return str(found[0].get("ctx", {}).get("error", found[0]["msg"]))


async def _wait_for_service(
    request: CheckRequest, auth: AuthConfig, addresses: AddressMap, progress: Progress
) -> _Checked:
    """One check, or as many as fit into `wait_seconds` until everything is served."""
    deadline = trio.current_time() + request.wait_seconds
    pause = _FIRST_WAIT_SECONDS
    while True:
        late = trio.current_time() + pause >= deadline
        try:
            checked = await _check_once(request, auth, addresses, progress)
            if late or checked.report.verdict is Verdict.SERVED:
                return checked
        except CheckError:
            if late:
                raise
        await trio.sleep(pause)
        pause = min(pause * 2, _LONGEST_WAIT_SECONDS)


async def _check_once(
    request: CheckRequest, auth: AuthConfig, addresses: AddressMap, progress: Progress
) -> _Checked:
    dialer = Dialer(stall_seconds=_STALL_SECONDS)
    identity = TlsIdentity(ca_file=request.ca_file)
    headers = _headers(auth)
    try:
        fetched = await fetch_card(
            request.source, dialer, identity, request.timeout_seconds, headers=headers
        )
        assert fetched.data is not None  # a fetch without validators brings a card
        card = load_object(fetched.data)
    except (CardFetchError, CardError) as error:
        raise CheckError(str(error)) from None
    options = CheckOptions(
        addresses=addresses,
        identity=identity,
        headers=headers,
        card_host=fetched.source_host,
        timeout_seconds=request.timeout_seconds,
    )
    report = await check_card(card, options, dialer, progress=progress)
    return _Checked(source=fetched.url.partition("?")[0], report=report)


def _headers(auth: AuthConfig) -> Headers:
    log = Log(level="error", form="text", clock=trio.current_time)
    try:
        return [(name.lower(), Secret(ref, log).read()) for name, ref in auth.headers.items()]
    except CredentialsUnavailable as error:
        raise CheckError(str(error)) from None
    finally:
        log.close()


async def fetch_card(
    source: str,
    dialer: Dialer,
    identity: TlsIdentity,
    timeout_seconds: float,
    *,
    headers: Headers | None = None,
) -> FetchedCard:
    """The card of `source`: a URL, the base URL of an agent, or a file. Raises CardFetchError."""
    try:
        config = AgentConfig.model_validate({"card": source}, context=Path.cwd())
    except ValueError as error:
        raise CardFetchError(f"the card: {_mistake(error)}") from None
    parts = urlsplit(config.card)
    if parts.scheme == "http" and not reaches_loopback(parts.hostname or ""):
        headers = []  # credentials do not go out in plaintext
    http = client(dialer, identity=identity, permit=lambda _: "")
    card_source = CardSource(resolve_source(config.card), http, timeout_seconds=timeout_seconds)
    return await card_source.fetch(headers=headers)


class _Screen:
    """The progress line of a terminal; nothing anywhere else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() else None

    def show(self, done: int, total: int, what: str) -> None:
        if self._stream is not None:
            self._stream.write(f"\r\x1b[Kchecking: {done} of {total} {what}"[:120])
            self._stream.flush()

    def clear(self) -> None:
        if self._stream is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


# --- printing -----------------------------------------------------------------------------------


def as_table(report: CardReport, source: str, *, colour: bool = False) -> str:
    """The report for people: a line per declaration, and one for each thing that is not right."""
    lines = [f"{report.name or 'unnamed agent'}: {source}", ""]
    lines += [f"  {_painted(Verdict.NOT_SERVED, colour)}  {text}" for text in report.problems]
    wide = max((len(row.declared.where) for row in report.rows), default=0)
    for row in report.rows:
        one = row.declared
        lines.append(
            f"  {_painted(row.verdict, colour)}  {one.where:<{wide}}  {one.transport:<9} {one.shown}"
        )
        lines += [
            f"      {finding.step}: {finding.text}"
            for finding in row.findings
            if finding.level is not Level.PASSED
        ]
    lines += ["", _summary(report)]
    if any(row.needs_credentials for row in report.rows):
        lines.append("some need credentials: --header NAME=SECRETREF sends them along")
    return "\n".join(lines)


def _painted(verdict: Verdict, colour: bool) -> str:
    word = f"{_VERDICT_WORDS[verdict]:<10}"
    return f"\x1b[{_COLOURS[verdict]}m{word}\x1b[0m" if colour else word


def _summary(report: CardReport) -> str:
    counts = [
        (sum(row.verdict is verdict for row in report.rows), _VERDICT_WORDS[verdict].lower())
        for verdict in Verdict
    ]
    return ", ".join(f"{count} {word}" for count, word in counts if count) or "nothing to check"


def as_data(report: CardReport, source: str) -> dict[str, Any]:
    """The report for programs."""
    return {
        "card": source,
        "agent": report.name,
        "result": report.verdict.words,
        "problems": list(report.problems),
        "interfaces": [
            {
                "where": row.declared.where,
                "binding": row.declared.transport,
                "url": row.declared.shown,
                "tenant": row.declared.tenant or None,
                "dialled": row.place or None,
                "result": row.verdict.words,
                "served_there": sorted(row.served),
                "needs_credentials": row.needs_credentials,
                "findings": [
                    {"step": str(one.step), "result": str(one.level), "text": one.text}
                    for one in row.findings
                ],
            }
            for row in report.rows
        ],
    }


def as_junit(report: CardReport, source: str) -> bytes:
    """The report as JUnit XML: a case per step; what is unknown is an error, not a failure."""
    suite = ET.Element("testsuite", name=f"check-card {source}")
    for text in report.problems:
        _case(suite, "card", "declarations", ("failure", text))
    for row in report.rows:
        one = row.declared
        name = f"{one.where} {one.transport} {one.shown}"
        for finding in row.findings:
            _case(suite, name, str(finding.step), _ending(finding))
    cases = list(suite)
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("errors", str(sum(case.find("error") is not None for case in cases)))
    document: bytes = ET.tostring(suite, encoding="utf-8", xml_declaration=True)
    return document


def _ending(finding: Finding) -> tuple[str, str] | None:
    match finding.level:
        case Level.FAILED:
            return "failure", finding.text
        case Level.UNKNOWN:
            return "error", finding.text
        case Level.NOTE:
            return "system-out", finding.text
        case Level.PASSED:
            return None


def _case(suite: ET.Element, group: str, name: str, ending: tuple[str, str] | None) -> None:
    case = ET.SubElement(suite, "testcase", classname=group, name=name)
    if ending is None:
        return
    kind, text = ending
    if kind == "system-out":
        ET.SubElement(case, kind).text = text
    else:
        ET.SubElement(case, kind, message=text)
