"""Nine pairs, eleven operations: through the sidecar it is as if the agent had been called directly.

Each scenario is run twice in the caller's binding: against the agent's own endpoint of that
binding, and through the sidecar, which reaches the same agent over another (or the same) one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness import Peer, message, open_stream, peer_sync
from tests.interop.callers import (
    BINDINGS,
    OPERATIONS,
    Between,
    Got,
    Target,
    between,
    canonical,
    direct,
    label,
    normalised,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

pytestmark = pytest.mark.interop

HOOK = "http://127.0.0.1:1/hook"


@pytest.fixture(scope="module")
def agent() -> Iterator[Peer]:
    with peer_sync("sdk_agent") as running:
        yield running


@pytest.fixture(scope="module")
def sidecar(agent: Peer) -> Iterator[Between]:
    with between(agent.urls) as running:
        yield running


# --- what is called ---------------------------------------------------------------------------


@dataclass
class World:
    """What was done at the agent before a call, over its JSON-RPC endpoint."""

    agent: Peer
    task: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        return direct("JSONRPC", self.agent.urls["JSONRPC"])

    async def send(self, text: str, **more: Any) -> dict[str, Any]:
        result = (await self.target.call("SendMessage", message(text, **more))).result
        task: dict[str, Any] = result["task"]
        return task

    async def cancel(self) -> None:
        await self.target.call("CancelTask", {"id": self.task["id"]})


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One call: how its request is made, and how it must end."""

    name: str
    method: str
    make: Callable[[World], Awaitable[Any]]
    ends: str = ""
    """The A2A error; '' for success."""
    not_on: tuple[str, ...] = ()
    """Bindings of the caller that cannot say this request."""
    cancels: bool = False
    """The task is cancelled after the first event."""


def fixed(request: Any) -> Callable[[World], Awaitable[Any]]:
    async def make(world: World) -> Any:
        return request

    return make


def on_task(text: str, id_name: str = "id", **more: Any) -> Callable[[World], Awaitable[Any]]:
    """A request that names a task that `text` made."""

    async def make(world: World) -> Any:
        world.task = await world.send(text)
        return {id_name: world.task["id"], **more}

    return make


def on_config(**more: Any) -> Callable[[World], Awaitable[Any]]:
    """A request that names a push configuration that exists."""

    async def make(world: World) -> Any:
        world.task = await world.send("input")
        request = {"taskId": world.task["id"], "id": "c-1", "url": HOOK, "token": "t"}
        await world.target.call("CreateTaskPushNotificationConfig", request)
        return {"taskId": world.task["id"], **more}

    return make


def listing(**more: Any) -> Callable[[World], Awaitable[Any]]:
    """A listing of the three tasks of one context."""

    async def make(world: World) -> Any:
        world.task = await world.send("hello")
        for text in ("input", "hello again"):
            await world.send(text, contextId=world.task["contextId"])
        return {"contextId": world.task["contextId"], **more}

    return make


async def second_page(world: World) -> Any:
    request = await listing(pageSize=2)(world)
    page = (await world.target.call("ListTasks", request)).result
    return {**request, "pageToken": page["nextPageToken"]}


RICH = message(
    metadata={
        "n": 1,
        "f": 1.5,
        "big": 2**53,
        "s": "é☃\U0001f600",
        "none": None,
        "deep": [{"a": []}],
    },
    extensions=["urn:x"],
    referenceTaskIds=["t-0"],
)
RICH["message"]["parts"] = [
    {"text": "echo"},
    {"text": "", "metadata": {"k": False}},
    {"raw": "/+8=", "filename": "a.bin", "mediaType": "application/octet-stream"},
    {"url": "https://example.org/x?a=b&c", "mediaType": "text/html"},
    {"data": {"list": [1, -3, 0.25, "x", None, True], "empty": {}}},
    {"data": None},
    {"data": "only text"},
]
RICH |= {
    "configuration": {
        "acceptedOutputModes": ["text/plain", "application/json"],
        "historyLength": 0,
        "returnImmediately": False,
        "taskPushNotificationConfig": {
            "url": HOOK,
            "token": "t",
            "authentication": {"scheme": "Bearer", "credentials": "c"},
        },
    },
    "metadata": {"top": [1, 2]},
}
TO_UNKNOWN_TASK = message("hello", taskId="no-such-task")
NO_ID: dict[str, Any] = {"message": {"role": "ROLE_USER", "parts": [{"text": "hello"}]}}
NO_ROLE: dict[str, Any] = {"message": {"messageId": "m", "parts": [{"text": "hello"}]}}
NO_PARTS: dict[str, Any] = {"message": {"messageId": "m", "role": "ROLE_USER"}}
NOWHERE = {"id": "no-such-task"}
NO_TASK = {"taskId": "no-such-task"}

SEND, STREAM, GET, LIST = "SendMessage", "SendStreamingMessage", "GetTask", "ListTasks"
CANCEL, SUBSCRIBE, CARD = "CancelTask", "SubscribeToTask", "GetExtendedAgentCard"
CREATE_PUSH, GET_PUSH = "CreateTaskPushNotificationConfig", "GetTaskPushNotificationConfig"
LIST_PUSH, DELETE_PUSH = "ListTaskPushNotificationConfigs", "DeleteTaskPushNotificationConfig"

SUCCESSES = [
    Scenario(name="task", method=SEND, make=fixed(message("hello"))),
    Scenario(name="message", method=SEND, make=fixed(message("message"))),
    Scenario(name="rich", method=SEND, make=fixed(RICH)),
    Scenario(name="events", method=STREAM, make=fixed(message("stream 2 free"))),
    Scenario(name="message", method=STREAM, make=fixed(message("message"))),
    Scenario(name="rich", method=STREAM, make=fixed(RICH)),
    Scenario(name="plain", method=GET, make=on_task("hello")),
    Scenario(name="no-history", method=GET, make=on_task("hello", historyLength=0)),
    Scenario(name="history", method=GET, make=on_task("hello", historyLength=1)),
    Scenario(name="context", method=LIST, make=listing()),
    Scenario(name="page", method=LIST, make=listing(pageSize=2, historyLength=0)),
    Scenario(name="second-page", method=LIST, make=second_page),
    Scenario(name="artifacts", method=LIST, make=listing(includeArtifacts=True)),
    Scenario(name="no-artifacts", method=LIST, make=listing(includeArtifacts=False)),
    Scenario(
        name="filter",
        method=LIST,
        make=listing(
            status="TASK_STATE_COMPLETED", statusTimestampAfter="2020-01-01T01:00:00+01:00"
        ),
    ),
    Scenario(name="empty", method=LIST, make=fixed({"contextId": "no such context"})),
    Scenario(name="waiting", method=CANCEL, make=on_task("input", metadata={"why": "no need"})),
    Scenario(name="waiting", method=SUBSCRIBE, make=on_task("input"), cancels=True),
    Scenario(
        name="whole",
        method=CREATE_PUSH,
        make=on_task(
            "input",
            "taskId",
            id="c-9",
            url=HOOK,
            token="t",
            authentication={"scheme": "Bearer", "credentials": "c"},
        ),
    ),
    Scenario(name="without-id", method=CREATE_PUSH, make=on_task("input", "taskId", url=HOOK)),
    Scenario(name="existing", method=GET_PUSH, make=on_config(id="c-1")),
    Scenario(name="existing", method=LIST_PUSH, make=on_config()),
    Scenario(name="paged", method=LIST_PUSH, make=on_config(pageSize=5)),
    Scenario(name="none", method=LIST_PUSH, make=on_task("input", "taskId")),
    Scenario(name="existing", method=DELETE_PUSH, make=on_config(id="c-1")),
    Scenario(name="absent", method=DELETE_PUSH, make=on_task("input", "taskId", id="c-1")),
]

NOT_FOUND, INVALID = "TASK_NOT_FOUND", "INVALID_PARAMS"
ERRORS = [
    Scenario(name="nowhere", method=SEND, make=fixed(TO_UNKNOWN_TASK), ends=NOT_FOUND),
    Scenario(
        name="raised",
        method=SEND,
        make=fixed(message("fail -32005")),
        ends="CONTENT_TYPE_NOT_SUPPORTED",
    ),
    Scenario(
        name="internal", method=SEND, make=fixed(message("fail -32603")), ends="INTERNAL_ERROR"
    ),
    Scenario(name="nowhere", method=STREAM, make=fixed(TO_UNKNOWN_TASK), ends=NOT_FOUND),
    Scenario(
        name="raised",
        method=STREAM,
        make=fixed(message("fail -32004")),
        ends="UNSUPPORTED_OPERATION",
    ),
    Scenario(name="nowhere", method=GET, make=fixed(NOWHERE), ends=NOT_FOUND),
    Scenario(name="nowhere", method=CANCEL, make=fixed(NOWHERE), ends=NOT_FOUND),
    Scenario(name="completed", method=CANCEL, make=on_task("hello"), ends="TASK_NOT_CANCELABLE"),
    Scenario(name="nowhere", method=SUBSCRIBE, make=fixed(NOWHERE), ends=NOT_FOUND),
    Scenario(
        name="completed", method=SUBSCRIBE, make=on_task("hello"), ends="UNSUPPORTED_OPERATION"
    ),
    Scenario(
        name="nowhere", method=CREATE_PUSH, make=fixed({**NO_TASK, "url": HOOK}), ends=NOT_FOUND
    ),
    Scenario(name="nowhere", method=GET_PUSH, make=fixed({**NO_TASK, "id": "c"}), ends=NOT_FOUND),
    Scenario(
        name="absent", method=GET_PUSH, make=on_task("input", "taskId", id="c"), ends=NOT_FOUND
    ),
    Scenario(name="nowhere", method=LIST_PUSH, make=fixed(NO_TASK), ends=NOT_FOUND),
    Scenario(
        name="nowhere", method=DELETE_PUSH, make=fixed({**NO_TASK, "id": "c"}), ends=NOT_FOUND
    ),
]

IN_PATH = ("HTTP+JSON",)
VALIDATION = [
    Scenario(name="no-id", method=SEND, make=fixed(NO_ID), ends=INVALID),
    Scenario(name="nothing", method=SEND, make=fixed({}), ends=INVALID),
    Scenario(name="no-role", method=STREAM, make=fixed(NO_ROLE), ends=INVALID),
    Scenario(name="no-parts", method=STREAM, make=fixed(NO_PARTS), ends=INVALID),
    Scenario(name="no-id", method=GET, make=fixed({"id": ""}), ends=INVALID, not_on=IN_PATH),
    Scenario(name="negative", method=GET, make=on_task("hello", historyLength=-1), ends=INVALID),
    Scenario(name="large-page", method=LIST, make=fixed({"pageSize": 101}), ends=INVALID),
    Scenario(name="no-page", method=LIST, make=fixed({"pageSize": 0}), ends=INVALID),
    Scenario(name="token", method=LIST, make=fixed({"pageToken": "no token"}), ends=INVALID),
    Scenario(name="no-id", method=CANCEL, make=fixed({"id": ""}), ends=INVALID, not_on=IN_PATH),
    Scenario(name="no-id", method=SUBSCRIBE, make=fixed({"id": ""}), ends=INVALID, not_on=IN_PATH),
    Scenario(name="no-url", method=CREATE_PUSH, make=on_task("input", "taskId"), ends=INVALID),
    Scenario(
        name="no-ids",
        method=GET_PUSH,
        make=fixed({"taskId": "", "id": ""}),
        ends=INVALID,
        not_on=IN_PATH,
    ),
    Scenario(
        name="no-task", method=LIST_PUSH, make=fixed({"taskId": ""}), ends=INVALID, not_on=IN_PATH
    ),
    Scenario(
        name="no-ids",
        method=DELETE_PUSH,
        make=fixed({"taskId": "", "id": "c"}),
        ends=INVALID,
        not_on=IN_PATH,
    ),
]


async def run(scenario: Scenario, target: Target, agent: Peer) -> Got:
    world = World(agent)
    request = await scenario.make(world)
    meanwhile = world.cancel if scenario.cancels else None
    return await target.call(scenario.method, request, meanwhile=meanwhile)


def shown(method: str, got: Got) -> Any:
    """The results in one spelling, without what differs between two runs."""
    name = OPERATIONS[method].response
    return normalised([canonical(name, result) for result in got.results])


def title(scenario: Scenario) -> str:
    return f"{scenario.method}-{scenario.name}"


@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize("scenario", SUCCESSES, ids=title)
async def test_results_are_the_agents(
    scenario: Scenario, down: str, agent: Peer, sidecar: Between
) -> None:
    expected = await run(scenario, direct(down, agent.urls[down]), agent)
    assert expected.fault is None
    for up in BINDINGS:
        got = await run(scenario, sidecar.through(down, up), agent)
        assert got.fault is None, up
        assert shown(scenario.method, got) == shown(scenario.method, expected), up
        assert (got.status, got.content_type) == (expected.status, expected.content_type), up
        assert (got.ids, got.event_names) == (expected.ids, expected.event_names), up
        assert got.get("a2a-sidecar-interface") == f"0-{label(up)}"
        if down == up != "GRPC":
            assert normalised(got.results) == normalised(expected.results)


@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize("scenario", [*ERRORS, *VALIDATION], ids=title)
async def test_errors_are_the_agents(
    scenario: Scenario, down: str, agent: Peer, sidecar: Between
) -> None:
    if down in scenario.not_on:
        return
    expected = (await run(scenario, direct(down, agent.urls[down]), agent)).fault
    assert expected is not None
    assert expected.kind == scenario.ends
    for up in BINDINGS:
        got = await run(scenario, sidecar.through(down, up), agent)
        fault = got.fault
        assert fault is not None, up
        assert got.results == []
        assert (fault.kind, fault.status, fault.code) == (
            expected.kind,
            expected.status,
            expected.code,
        ), up
        if got.get("a2a-sidecar-interface") is not None:
            assert normalised(fault.message) == normalised(expected.message), up
        else:  # the sidecar saw it before it asked any agent
            assert scenario in VALIDATION, up
            assert fault.message


@pytest.mark.parametrize("down", BINDINGS)
async def test_the_extended_card_is_the_agents_but_for_where_it_leads(
    down: str, agent: Peer, sidecar: Between
) -> None:
    own = (await direct(down, agent.urls[down]).call(CARD)).result
    for up in BINDINGS:
        card = (await sidecar.through(down, up).call(CARD)).result
        for name in ("supportedInterfaces", "securitySchemes", "securityRequirements"):
            card.pop(name, None)
        expected = {name: own[name] for name in own if name != "supportedInterfaces"}
        assert canonical("AgentCard", card) == canonical("AgentCard", expected), up


@pytest.mark.parametrize("up", BINDINGS)
async def test_a_task_is_subscribed_to_by_get_as_well(
    up: str, agent: Peer, sidecar: Between
) -> None:
    """The schema says GET, the specification's tables say POST."""
    world = World(agent)
    world.task = await world.send("input")
    target = sidecar.through("HTTP+JSON", up)
    path = f"{target.path}/tasks/{world.task['id']}:subscribe"
    async with open_stream(target.port, "GET", path) as events:
        assert (await events.next()).json()["task"]["id"] == world.task["id"]
        await world.cancel()
        assert "statusUpdate" in (await events.next()).json()
