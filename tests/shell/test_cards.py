"""The desk that serves cards: what it answers when there is none to be had."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from sidecar.agent import Unavailable
from sidecar.config import TcpAddress, UnixAddress
from sidecar.core.errors import own
from sidecar.core.spec import Binding
from sidecar.core.types import Form, Payload
from sidecar.doors.cards import CardDesk, Place, is_current
from sidecar.result import Result
from tests.core.calls import call
from tests.harness import card

PLACE = Place(binding=Binding.JSONRPC, address=TcpAddress("127.0.0.1", 7420), agent=None)


@dataclass
class Request:
    method: str = "GET"
    headers: list[tuple[str, str]] = field(default_factory=lambda: [("host", "127.0.0.1:7420")])
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)

    async def respond(self, status: int, headers: Any, body: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.answers.append((status, dict(headers), body))


@dataclass
class Agent:
    answer: Any
    name: str = "a"
    card_max_age: float = 300.0
    card_last_modified: str = ""

    async def fresh_card(self) -> bytes:
        if self.answer is None:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        if isinstance(self.answer, Exception):
            raise self.answer
        data: bytes = self.answer
        return data


async def serve(answer: Any, **request: Any) -> tuple[int, dict[str, str], Any]:
    desk = CardDesk()
    desk.use([PLACE])
    made = Request(**request)
    await desk.serve(made, Agent(answer), PLACE)  # type: ignore[arg-type]
    ((status, headers, body),) = made.answers
    return status, headers, json.loads(body) if body else None


async def test_an_agent_that_does_not_answer_is_504_after_the_deadline(autojump_clock):
    began = trio.current_time()
    status, headers, body = await serve(None)
    assert status == 504
    assert trio.current_time() - began == pytest.approx(10)
    assert headers["content-type"] == "application/json"
    assert headers["cache-control"] == "no-store"
    assert body["error"]["code"] == 504
    assert body["error"]["details"][0]["reason"] == "CARD_UNAVAILABLE"


@pytest.mark.parametrize(
    ("reason", "status"),
    [("CARD_UNAVAILABLE", 502), ("NO_ELIGIBLE_INTERFACE", 502), ("AGENT_DISABLED", 503)],
)
async def test_why_there_is_no_card(reason, status):
    found, headers, body = await serve(Unavailable(reason, "that is why"))
    assert (found, body["error"]["code"]) == (status, status)
    assert body["error"]["message"] == "that is why"
    (info,) = body["error"]["details"]
    assert (info["reason"], info["domain"]) == (reason, "a2a-sidecar")
    assert info["metadata"]["agent"] == "a"
    assert headers["cache-control"] == "no-store"


async def test_a_card_that_cannot_be_rewritten():
    status, _, body = await serve(b"[]")
    assert status == 502
    assert "not a JSON object" in body["error"]["message"]


DATA = json.dumps(card([("GRPC", "10.9.9.9:1")])).encode()


async def test_headers_of_a_card():
    status, headers, body = await serve(DATA)
    assert status == 200
    assert headers["cache-control"] == "max-age=300"
    assert "last-modified" not in headers
    url = "http://127.0.0.1:7420/agents/a"
    assert body["supportedInterfaces"] == [
        {"url": url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}
    ]
    again, _, nothing = await serve(
        DATA, headers=[("host", "127.0.0.1:7420"), ("if-none-match", headers["etag"])]
    )
    assert (again, nothing) == (304, None)


@pytest.mark.parametrize(
    "host", ["", "a b", 'x"y', "h:99999999", "h/..", "user@h", "[::1", "exa\u00e4mple"]
)
async def test_a_host_that_is_none_does_not_get_into_the_card(host):
    _, _, body = await serve(DATA, headers=[("host", host)])
    assert body["supportedInterfaces"][0]["url"] == "http://127.0.0.1:7420/agents/a"


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "[::1]:7420", "weather.localhost"])
async def test_the_host_that_the_client_used_does(host):
    _, _, body = await serve(DATA, headers=[("host", host)])
    assert body["supportedInterfaces"][0]["url"] == f"http://{host}/agents/a"


def test_sockets_in_the_file_system_are_published_only_with_advertise():
    desk = CardDesk()
    path = UnixAddress("/run/a.sock")
    hidden = Place(binding=Binding.GRPC, address=path, agent="a")
    shown = Place(binding=Binding.HTTP_JSON, address=path, agent="a", advertise="box.local:80")
    secure = Place(binding=Binding.JSONRPC, address=TcpAddress("127.0.0.1", 1), agent="a", tls=True)
    other = Place(binding=Binding.JSONRPC, address=TcpAddress("127.0.0.1", 2), agent="b")
    desk.use([hidden, shown, secure, other])
    served = json.loads(desk.rewrite(DATA, "a", secure, "127.0.0.1:1"))["supportedInterfaces"]
    assert [one["url"] for one in served] == ["https://127.0.0.1:1/", "http://box.local:80"]


ASKED = call("GetExtendedAgentCard")


def test_an_extended_card_that_cannot_be_read_is_an_error():
    desk = CardDesk()
    desk.use([PLACE])
    result = Result(payload=Payload(Form.JSON, b"7"))
    desk.rewrite_answer(result, ASKED, "a", PLACE, "")
    assert result.payload is None
    assert result.outcome == "ambiguous"
    assert result.error is not None
    assert (result.error.reason, result.error.delivered) == ("DELIVERY_UNKNOWN", "unknown")


def test_errors_are_left_as_they_are():
    error = own("NOT_DELIVERED", "x")
    result = Result(error=error)
    CardDesk().rewrite_answer(result, ASKED, "a", PLACE, "")
    assert (result.payload, result.error) == (None, error)


@pytest.mark.parametrize(
    ("sent", "current"),
    [
        (None, False),
        ('"a"', True),
        ('W/"a"', True),
        ('"b", "a"', True),
        ('"b"', False),
        ("*", True),
    ],
)
def test_if_none_match(sent, current):
    assert is_current(sent, '"a"') is current
