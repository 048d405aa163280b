"""What the documents say, held against the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sidecar import config
from sidecar.config_values import TcpAddress
from sidecar.core import errors, failover
from sidecar.core.spec import GRPC_STATUS_NAMES, Binding

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]


def rows(text):
    """The cells of every table row in `text`, heads and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if re.fullmatch(r"`[^`]+`", row[0])]


# --- the failure table ------------------------------------------------------------------------


def test_failover_has_the_table_of_the_code():
    """When this fails: put what `a2a-sidecar explain --table` prints between the markers."""
    text = (DOCS / "failover.md").read_text("utf-8")
    start, end = "<!-- a2a-sidecar explain --table -->\n", "<!-- end -->\n"
    assert text.count(start) == text.count(end) == 1
    assert text.partition(start)[2].partition(end)[0] == failover.table_as_markdown()


# --- configuration ----------------------------------------------------------------------------

LISTENER = config.ListenerConfig(address=TcpAddress("127.0.0.1", 0), binding=Binding.JSONRPC)
OAUTH = {"token_url": "https://a/t", "client_id": "env:A", "client_secret": "env:B"}

TABLES = {
    "[[listeners]]": LISTENER,
    "[admin]": config.AdminConfig(),
    "[agents.NAME]": config.AgentConfig(card="http://a"),
    "[agents.NAME.tls]": config.TlsConfig(),
    "[agents.NAME.auth]": config.AuthConfig(),
    "[agents.NAME.auth.oauth]": config.OAuthConfig.model_validate(OAUTH),
    "[publish.NAME]": config.PublishConfig.model_validate(
        {"card": "http://a", "address": "127.0.0.1:1"}
    ),
    "[limits]": config.Limits(),
    "[log]": config.LogConfig(),
}
SAME_AS_AUTH = "[agents.NAME.discovery_auth]"


def configuration_sections():
    text = (DOCS / "configuration.md").read_text("utf-8")
    parts = re.split(r"^## `(.+)`$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def is_table(name, model):
    """Whether a key is a table with a section of its own."""
    field = type(model).model_fields[name]
    names = {title.rpartition(".")[2].strip("[]") for title in configuration_sections()}
    return name in names and "Config" in str(field.annotation)


def expected_default(name, model):
    field = type(model).model_fields[name]
    if field.is_required():
        return "required"
    default = model.model_dump(mode="json")[name]
    return "none" if default in (None, {}) else f"`{json.dumps(default)}`"


def test_every_table_of_the_configuration_has_its_section():
    sections = configuration_sections()
    assert set(sections) == {*TABLES, SAME_AS_AUTH}
    assert "`[agents.NAME.auth]`" in sections[SAME_AS_AUTH]
    assert set(config.Config.model_fields) == {
        "listeners",
        "admin",
        "agents",
        "publish",
        "limits",
        "log",
    }


@pytest.mark.parametrize("title", TABLES)
def test_every_key_of_the_configuration_is_explained_with_its_default(title):
    model = TABLES[title]
    wanted = {
        f"`{name}`": expected_default(name, model)
        for name in type(model).model_fields
        if not is_table(name, model)
    }
    explained = rows(configuration_sections()[title])
    assert {key: default for key, default, _ in explained} == wanted
    assert all(meaning for _, _, meaning in explained)


# --- errors -----------------------------------------------------------------------------------


def used_reasons():
    """The sidecar's own reasons that some module gives."""
    sources = [
        path.read_text("utf-8")
        for path in (ROOT / "sidecar").rglob("*.py")
        if path.parts[-2:] != ("core", "errors.py") and "_pb" not in path.parts
    ]
    return {reason for reason in errors.OWN_REASONS if any(f'"{reason}"' in s for s in sources)}


def test_errors_lists_the_reasons_with_their_statuses():
    text = (DOCS / "errors.md").read_text("utf-8")
    table = {row[0].strip("`"): row[1:4] for row in rows(text) if len(row) == 5}
    assert "NOT_DELIVERED" in used_reasons()
    assert used_reasons() <= set(table) <= set(errors.OWN_REASONS)
    for reason, shown in table.items():
        http, grpc, code = errors.OWN_REASONS[reason]
        assert shown == [str(code), str(http), GRPC_STATUS_NAMES[grpc]], reason


# --- the whole --------------------------------------------------------------------------------


def test_readme_opens_with_the_two_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    opening = text.partition("## ")[0]
    commands = [line.split("#")[0].strip() for line in opening.splitlines() if "make " in line]
    assert commands[:2] == ["make demo", "make test"]
    assert opening.index("make demo") < 50


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text("utf-8"))
    files = [target for target in targets if "://" not in target]
    assert [name for name in files if not (path.parent / name).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_metrics_that_are_named_exist(path):
    source = (ROOT / "sidecar" / "telemetry.py").read_text("utf-8")
    named = re.findall(r"`(?:a2a_sidecar_)?([a-z_]+_(?:total|seconds))`", path.read_text("utf-8"))
    keys = {key for model in TABLES.values() for key in type(model).model_fields}
    missing = [name for name in named if f'"{name.removesuffix("_total")}"' not in source]
    assert [name for name in missing if name not in keys] == []
