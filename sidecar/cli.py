"""The command line: ``a2a-sidecar`` and its subcommands."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

from sidecar import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.config import Config

_DEFAULT_CONFIG = "/etc/a2a-sidecar/config.toml"

# Exit codes: 0 done, 1 the answer is no (a bad configuration, a failed call), 2 usage, 130 Ctrl-C.
_FAILED = 1
_USAGE = 2
_INTERRUPTED = 130
_STANDARD_ERROR = 2


class _Refused(Exception):
    """The command cannot be carried out; the text says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        code = run(options)
    except SystemExit:
        _flush()
        raise
    except _Refused as error:
        print(error, file=sys.stderr)
        code = _FAILED
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BrokenPipeError:
        code = _FAILED
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"a2a-sidecar: {error.strerror or error}{where}", file=sys.stderr)
        code = _FAILED
    return code if _flush() else _FAILED


def _flush() -> bool:
    """Write what is left of standard output; False when nobody takes it.

    The interpreter's own last attempt must then succeed, or it complains.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="a2a-sidecar",
        description="Reaches remote A2A agents over whichever interface is really served.",
    )
    parser.add_argument("--version", action="version", version=f"a2a-sidecar {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run the daemon until SIGTERM")
    _add_config(run)
    run.set_defaults(run=_run)

    check = commands.add_parser(
        "check-config", help="report every mistake in a configuration, or print what is in effect"
    )
    _add_config(check)
    check.set_defaults(run=_check_config)

    explain = commands.add_parser(
        "explain", help="show which interfaces of a card are used, in which order, and why"
    )
    explain.add_argument(
        "source", nargs="?", help="an agent of the configuration, or a card's URL or file"
    )
    _add_config(explain)
    explain.add_argument("--raw", action="store_true", help="print the card as it was fetched")
    explain.add_argument("--table", action="store_true", help="print the failure table")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(run=_explain)

    _add_check_card(
        commands.add_parser(
            "check-card",
            help="tell whether everything that a card declares is really served",
            description="Probes what a card declares, and executes nothing. Exit code 0: all of it"
            " is served; 1: something is not; 2: something is unknown, or the check could not run.",
        )
    )

    publish = commands.add_parser(
        "publish",
        help="serve a card only while its agent is as the card says",
        description="Serves the cards of the [publish.NAME] tables, and 503 with the reasons while"
        " something that they declare is not served.",
    )
    publish.add_argument("names", metavar="NAME", nargs="*", help="a table (default: all of them)")
    publish.add_argument(
        "--config",
        metavar="FILE",
        default=_DEFAULT_CONFIG,
        help="the configuration (default: %(default)s)",
    )
    publish.set_defaults(run=_publish, agents=None)

    send = commands.add_parser("send", help="send one message through a running sidecar")
    send.add_argument("text", help="the message's text")
    send.add_argument("--agent", metavar="NAME", help="which agent, when there are several")
    send.add_argument(
        "--to",
        metavar="ADDRESS",
        default="127.0.0.1:7420",
        help="the JSON-RPC listener: HOST:PORT or unix:PATH (default: %(default)s)",
    )
    send.add_argument("--stream", action="store_true", help="send it as SendStreamingMessage")
    send.set_defaults(run=_send)

    status = commands.add_parser("status", help="show what a running sidecar knows of its agents")
    status.add_argument(
        "--admin",
        metavar="ADDRESS",
        default="127.0.0.1:7429",
        help="the admin address (default: %(default)s)",
    )
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=_seconds,
        const=2.0,
        help="show it again every so often (default: every %(const)s seconds)",
    )
    form.add_argument(
        "--ready",
        action="store_true",
        help="print only why it is not ready; exit code 0: it is, 1: it is not",
    )
    status.set_defaults(run=_status)

    demo = commands.add_parser(
        "demo", help="show a failover: an agent with a lying card, and a message that arrives"
    )
    demo.set_defaults(run=_demo)
    return parser


def _add_check_card(check: argparse.ArgumentParser) -> None:
    check.add_argument("source", metavar="SOURCE", help="a card's URL, an agent's base URL, a file")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument("--junit", metavar="FILE", default="", help="write a JUnit report too")
    check.add_argument(
        "--map",
        metavar="PUBLIC=LOCAL",
        action="append",
        default=[],
        help="where a public address is really found, as"
        " https://agent.example=http://127.0.0.1:8000; may be repeated",
    )
    check.add_argument(
        "--timeout-seconds",
        metavar="N",
        type=_positive_seconds,
        default=5.0,
        help="for each probe (default: %(default)s)",
    )
    check.add_argument(
        "--wait-seconds",
        metavar="N",
        type=_seconds,
        default=0.0,
        help="go on checking for so long until everything is served (default: check once)",
    )
    check.add_argument(
        "--header",
        metavar="NAME=SECRETREF",
        action="append",
        default=[],
        help="a header that the agent wants, its value from file:PATH, env:NAME or"
        " credential:NAME; may be repeated",
    )
    check.add_argument(
        "--ca-file", metavar="FILE", default="", help="trusted instead of the system's authorities"
    )
    check.set_defaults(run=_check_card)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 3600:
        raise ValueError
    return value


def _positive_seconds(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise ValueError
    return value


_positive_seconds.__name__ = "number of seconds above 0"
_seconds.__name__ = "number of seconds"  # what argparse calls it in its error


def _add_config(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--config",
        metavar="FILE",
        default=_DEFAULT_CONFIG,
        help="the configuration (default: %(default)s)",
    )
    source.add_argument(
        "--agent",
        action="append",
        metavar="NAME=CARD_URL",
        dest="agents",
        help="an agent, instead of a configuration; may be repeated",
    )


def _load(options: argparse.Namespace) -> Config:
    from sidecar import config  # noqa: PLC0415

    try:
        if options.agents:
            return config.from_agents(options.agents)
        return config.load(options.config)
    except config.ConfigError as error:
        raise _Refused(str(error)) from None


# Each command imports what it needs: the others start without it.


def _run(options: argparse.Namespace) -> int:
    # Until the daemon runs there is nothing to reload.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _prepare_descriptors()
    import trio  # noqa: PLC0415

    from sidecar.credentials import CredentialsUnavailable  # noqa: PLC0415
    from sidecar.daemon import Daemon  # noqa: PLC0415
    from sidecar.listener import BindError  # noqa: PLC0415

    daemon = Daemon(_load(options), path=None if options.agents else options.config)
    try:
        trio.run(daemon.run)
    except (BindError, CredentialsUnavailable) as error:
        raise _Refused(f"a2a-sidecar: {error}") from None
    return _INTERRUPTED if daemon.interrupted else 0


def _prepare_descriptors() -> None:
    """As many as may be had, and none of the standard three free: a connection would become the log."""
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)


def _check_config(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from sidecar import config  # noqa: PLC0415

    print(config.effective(loaded), end="")
    return 0


def _explain(options: argparse.Namespace) -> int:
    from sidecar.core.failover import table_as_markdown  # noqa: PLC0415

    if options.table:
        print(table_as_markdown(), end="")
        return 0
    if options.source is None:
        print("a2a-sidecar explain: name an agent, or a card's URL or file", file=sys.stderr)
        return _USAGE
    from sidecar import explain  # noqa: PLC0415

    given = options.agents or options.config != _DEFAULT_CONFIG
    loaded = _load(options) if given else None
    return explain.explain(options.source, loaded, raw=options.raw, as_json=options.json)


def _check_card(options: argparse.Namespace) -> int:
    from sidecar import check_card  # noqa: PLC0415

    return check_card.run(
        check_card.CheckRequest(
            source=options.source,
            as_json=options.json,
            junit=options.junit,
            addresses=options.map,
            headers=options.header,
            timeout_seconds=options.timeout_seconds,
            wait_seconds=options.wait_seconds,
            ca_file=options.ca_file,
        )
    )


def _publish(options: argparse.Namespace) -> int:
    import trio  # noqa: PLC0415

    from sidecar.credentials import CredentialsUnavailable  # noqa: PLC0415
    from sidecar.listener import BindError  # noqa: PLC0415
    from sidecar.publish import Publisher  # noqa: PLC0415

    loaded = _load(options)
    unknown = [name for name in options.names if name not in loaded.publish]
    if unknown or not loaded.publish:
        what = ", ".join(f"[publish.{name}]" for name in unknown) or "[publish.NAME]"
        print(f"a2a-sidecar publish: {options.config} has no table {what}", file=sys.stderr)
        return _FAILED
    try:
        trio.run(Publisher(loaded, options.names).run)
    except (BindError, CredentialsUnavailable) as error:
        print(f"a2a-sidecar: {error}", file=sys.stderr)
        return _FAILED
    return 0


def _send(options: argparse.Namespace) -> int:
    from sidecar import client  # noqa: PLC0415

    return client.send(
        options.to, options.text, agent=options.agent, stream=options.stream, write=print
    )


def _status(options: argparse.Namespace) -> int:
    from sidecar import client  # noqa: PLC0415

    if options.ready:
        return client.ready(options.admin, print)
    if options.watch is not None:
        return client.watch(options.admin, options.watch, print)
    status = client.status(options.admin)
    if status is None:
        return _FAILED
    if options.json:
        print(json.dumps(status, indent=2))
    else:
        print(client.status_table(status))
    return 0


def _demo(options: argparse.Namespace) -> int:
    del options
    from sidecar import demo  # noqa: PLC0415

    return demo.main()
