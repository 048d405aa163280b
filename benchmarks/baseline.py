"""The baseline: an ASGI app that forwards with httpx, as most would write it first."""

from __future__ import annotations

import os

import httpx

_STUB = f"http://127.0.0.1:{os.environ.get('STUB', '')}"
_client = httpx.AsyncClient(base_url=_STUB, timeout=None, trust_env=False)


async def app(scope: dict, receive: object, send: object) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()  # type: ignore[operator]
            await send({"type": f"{message['type']}.complete"})  # type: ignore[operator]
            if message["type"] == "lifespan.shutdown":
                return
    body = b""
    while True:
        message = await receive()  # type: ignore[operator]
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    reply = await _client.post(
        scope["path"], content=body, headers={"content-type": "application/json"}
    )
    await send(  # type: ignore[operator]
        {
            "type": "http.response.start",
            "status": reply.status_code,
            "headers": [(b"content-type", b"application/json")],
        }
    )
    await send({"type": "http.response.body", "body": reply.content})  # type: ignore[operator]
