"""The tenant: set per hop, never relayed (A2A 8.3.2 rule 4; DESIGN 3.6).

The caller's tenant is taken out of a request and goes back into answers that carry one; the
chosen interface's tenant goes into the request that leaves.
"""

from __future__ import annotations

from sidecar.core import convert, payload
from sidecar.core.spec import LIST_PUSH_CONFIGS, Operation
from sidecar.core.types import Form, Payload

_PUSH_CONFIG = "TaskPushNotificationConfig"


def take(operation: Operation, message: Payload) -> tuple[str, Payload]:
    """The request's tenant, and the request without it; raises PayloadError, InvalidMessage."""
    if message.form is Form.PROTO:
        tenant, data = convert.take_tenant(operation.request, message.data)
        return tenant, Payload(Form.PROTO, data)
    data = message.data
    tenant = ""
    if b'"tenant"' in data or b"\\u" in data:
        raw = payload.get_member(data, "tenant")
        if raw is not None:
            tenant = "" if raw == b"null" else payload.parse_string(raw)
            data = payload.with_member(data, "tenant", None)
        data = _in_nested_config(operation, data, "")
    return tenant, (message if data is message.data else Payload(Form.JSON, data))


def put(operation: Operation, message: Payload, tenant: str) -> Payload:
    """The request with `tenant` in it, and in the push configuration of a Send."""
    if not tenant:
        return message
    if message.form is Form.PROTO:
        return Payload(Form.PROTO, convert.put_tenant(operation.request, message.data, tenant))
    data = payload.with_member(message.data, "tenant", payload.json_string(tenant))
    return Payload(Form.JSON, _in_nested_config(operation, data, tenant))


def put_nested(operation: Operation, message: Payload, tenant: str) -> Payload:
    """JSON only: `tenant` in the push configuration of a Send; the request's own goes elsewhere."""
    data = _in_nested_config(operation, message.data, tenant)
    return message if data is message.data else Payload(Form.JSON, data)


def answer(operation: Operation, message: Payload, tenant: str) -> Payload:
    """The result with the caller's tenant where the agent put the interface's."""
    nested = operation is LIST_PUSH_CONFIGS
    if not nested and operation.response != _PUSH_CONFIG:
        return message
    if message.form is Form.PROTO:
        return Payload(Form.PROTO, convert.answer_tenant(operation.response, message.data, tenant))
    if not nested:
        return Payload(Form.JSON, _set(message.data, tenant))
    raw = payload.get_member(message.data, "configs")
    if raw in (None, b"null"):
        return message
    configs = [_set(config, tenant) for config in payload.split_array(raw or b"[]")]
    joined = b"[" + b",".join(configs) + b"]"
    return Payload(Form.JSON, payload.with_member(message.data, "configs", joined))


def _set(data: bytes, tenant: str) -> bytes:
    return payload.with_member(data, "tenant", payload.json_string(tenant) if tenant else None)


def _in_nested_config(operation: Operation, data: bytes, tenant: str) -> bytes:
    if not operation.sends or (b"onfig" not in data and b"\\u" not in data):
        return data
    configuration = payload.get_member(data, "configuration")
    if configuration is None or configuration[:1] != b"{":
        return data
    changed = configuration
    # Both spellings, if both are there: receivers differ in which one they take.
    for name in ("taskPushNotificationConfig", "task_push_notification_config"):
        config = payload.get_member(changed, name)
        if config is not None and config[:1] == b"{":
            changed = payload.with_member(changed, name, _set(config, tenant))
    if changed == configuration:
        return data
    return payload.with_member(data, "configuration", changed)
