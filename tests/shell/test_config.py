"""The configuration file: what it gives, and every mistake with its line."""

import re
from pathlib import Path

import pytest
import tomli

from sidecar.config import (
    AdminConfig,
    AgentConfig,
    AuthConfig,
    Config,
    ConfigError,
    Limits,
    ListenerConfig,
    LogConfig,
    OAuthConfig,
    PublishConfig,
    TcpAddress,
    TlsConfig,
    UnixAddress,
    effective,
    from_agents,
    load,
    schema,
)
from sidecar.core.spec import Binding

EXAMPLE = Path(__file__).parents[2] / "config.toml"


@pytest.fixture
def write(tmp_path):
    """Writes a configuration and gives its path."""

    def _write(text):
        path = tmp_path / "config.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return _write


@pytest.fixture
def problems(write):
    """The mistakes in a text, as (key, line, message)."""

    def _problems(text):
        with pytest.raises(ConfigError) as caught:
            load(write(text))
        return [(p.key, p.line, p.message) for p in caught.value.problems]

    return _problems


# --- what is accepted -------------------------------------------------------------------------


def test_an_empty_file_is_every_default(write):
    config = load(write(""))
    assert config == Config()
    assert config.listeners == (
        ListenerConfig(address=TcpAddress("127.0.0.1", 7420), binding=Binding.JSONRPC),
    )
    assert config.admin.address == TcpAddress("127.0.0.1", 7429)
    assert dict(config.agents) == {}
    assert config.limits == Limits(
        request_bytes=16 << 20,
        response_bytes=64 << 20,
        event_bytes=16 << 20,
        header_bytes=64 << 10,
        buffered_bytes=256 << 20,
        connections=1024,
        drain_seconds=30.0,
        keepalive_seconds=4.0,
        stall_seconds=120.0,
    )
    assert config.log == LogConfig(level="info", format="text", calls=False)


def test_defaults_of_an_agent(write):
    agent = load(write('[agents.weather]\ncard = "https://agents.example.com/weather"\n')).agents
    assert agent["weather"] == AgentConfig(
        card="https://agents.example.com/weather",
        card_exact=False,
        enabled=True,
        prefer=(),
        connect_timeout_seconds=5.0,
        response_timeout_seconds=600.0,
        stream_open_timeout_seconds=60.0,
        refresh_cooldown_seconds=1.0,
        advance_on_ambiguous=True,
        stream_dial_failover=False,
        trusted_hosts=(),
        max_concurrency=256,
        max_streams=256,
        tls=TlsConfig(),
    )


def test_every_key_arrives(write, tmp_path):
    for name in ("ca.pem", "cert.pem", "key.pem", "card.json"):
        (tmp_path / name).touch()
    config = load(
        write("""
[[listeners]]
address = "unix:/run/a.sock"
binding = "JSONRPC"
agent = "b"
mode = "0600"
[[listeners]]
address = "[::1]:7420"
binding = "JSONRPC"
[admin]
address = "127.0.0.1:0"
[agents.b]
card = "card.json"
card_exact = true
enabled = false
prefer = ["GRPC", "HTTP+JSON"]
connect_timeout_seconds = 1
response_timeout_seconds = 2
stream_open_timeout_seconds = 0.5
refresh_cooldown_seconds = 3
advance_on_ambiguous = false
stream_dial_failover = true
trusted_hosts = ["A.example.com", "[::1]"]
max_concurrency = 1
max_streams = 2
tls = { ca_file = "ca.pem", client_cert_file = "cert.pem", client_key_file = "./key.pem", server_name = "X" }
[agents.a]
card = "http://127.0.0.1:9000"
[limits]
request_bytes = 1024
response_bytes = 1025
event_bytes = 1026
header_bytes = 4096
buffered_bytes = 1048576
connections = 3
drain_seconds = 1
keepalive_seconds = 2
stall_seconds = 3
[log]
level = "debug"
format = "json"
calls = true
""")
    )
    assert config.listeners == (
        ListenerConfig.model_construct(
            address=UnixAddress("/run/a.sock"), binding=Binding.JSONRPC, agent="b", mode=0o600
        ),
        ListenerConfig(address=TcpAddress("::1", 7420), binding=Binding.JSONRPC),
    )
    assert config.admin == AdminConfig(address=TcpAddress("127.0.0.1", 0))
    assert list(config.agents) == ["b", "a"]
    agent = config.agents["b"]
    assert agent.card == str(tmp_path / "card.json")
    assert (agent.card_exact, agent.enabled) == (True, False)
    assert agent.prefer == (Binding.GRPC, Binding.HTTP_JSON)
    assert agent.connect_timeout_seconds == 1.0
    assert isinstance(agent.connect_timeout_seconds, float)
    assert agent.response_timeout_seconds == 2
    assert agent.stream_open_timeout_seconds == 0.5
    assert agent.refresh_cooldown_seconds == 3
    assert (agent.advance_on_ambiguous, agent.stream_dial_failover) == (False, True)
    assert agent.trusted_hosts == ("a.example.com", "::1")
    assert (agent.max_concurrency, agent.max_streams) == (1, 2)
    assert agent.tls.ca_file == tmp_path / "ca.pem"
    assert agent.tls.client_cert_file == tmp_path / "cert.pem"
    assert agent.tls.client_key_file == tmp_path / "key.pem"
    assert agent.tls.server_name == "x"
    assert list(config.limits.model_dump().values()) == [
        1024,
        1025,
        1026,
        4096,
        1 << 20,
        3,
        1,
        2,
        3,
    ]
    assert config.log == LogConfig(level="debug", format="json", calls=True)


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("http://127.0.0.1:9000", "http://127.0.0.1:9000"),
        ("HTTPS://A.example.com/x?y=z", "HTTPS://A.example.com/x?y=z"),
        ("http://[::1]:9000/x", "http://[::1]:9000/x"),
        ("http://a/x@y", "http://a/x@y"),
        ("cards/one two.json", "{dir}/cards/one two.json"),
        ("./cards/../cards/one two.json", "{dir}/cards/one two.json"),
        ("file://{dir}/cards/one%20two.json", "{dir}/cards/one two.json"),
        ("file:{dir}/cards/one%20two.json", "{dir}/cards/one two.json"),
        ("file://localhost{dir}/cards/one%20two.json", "{dir}/cards/one two.json"),
        ("{dir}/cards/one two.json", "{dir}/cards/one two.json"),
    ],
)
def test_cards(write, tmp_path, card, expected):
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "one two.json").touch()
    config = load(write(f'[agents.a]\ncard = "{card.format(dir=tmp_path)}"\n'))
    assert config.agents["a"].card == expected.format(dir=tmp_path)


def test_file_names_start_at_the_file_not_at_the_working_directory(write, tmp_path, monkeypatch):
    path = write('[agents.a]\ncard = "c.json"\n')
    (tmp_path / "c.json").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(path).agents["a"].card == str(tmp_path / "c.json")
    assert load("../config.toml").agents["a"].card == str(tmp_path / "c.json")


def test_a_byte_order_mark_is_no_mistake(write, problems):
    assert load(write(b"\xef\xbb\xbf[log]\ncalls = true\n")).log.calls
    assert problems(b"\xef\xbb\xbf[log]\ncalls = 1\n") == [
        ("log.calls", 2, "must be true or false, not 1")
    ]


def test_agents_are_equal_until_a_key_changes(write):
    short = load(write('[agents.a]\ncard = "http://a"\n')).agents["a"]
    spelled = load(
        write('agents = { a = { max_streams = 256, card = "http://a", tls = {} } }')
    ).agents["a"]
    other = load(write('[agents.a]\ncard = "http://a"\nmax_streams = 255\n')).agents["a"]
    deep = load(write('[agents.a]\ncard = "http://a"\ntls.server_name = "x"\n')).agents["a"]
    assert short == spelled
    assert short != other
    assert short != deep


def test_the_configuration_cannot_be_changed(write):
    config = load(write('[agents.a]\ncard = "http://a"\n'))
    with pytest.raises(ValueError, match="frozen"):
        config.limits.connections = 1
    with pytest.raises(TypeError):
        config.agents["b"] = config.agents["a"]  # type: ignore[index]


# --- mistakes ---------------------------------------------------------------------------------

MANY = """\
extra = 1
[[listener]]
address = "x"

[[listeners]]
address = "0.0.0.0:80"
binding = "GRPC"
agent = "wether"
mode = "0660"
[[listeners]]
address = "127.0.0.1:7429"
binding = "JSON-RPC"
[[listeners]]
# nothing here

[agents.weather]
card = "http://user:hunter2@h/"
connect_timeout_secs = 4
max_streams = 1.5
connect_timeout_seconds = inf
prefer = ["GRPC",
  "grpc",
  3]
trusted_hosts = [
  "http://a",
]
token = "hunter2"
[agents.weather.tls]
client_cert_file = "nope.pem"
[agents.card]
[agents]
Bad = { card = "nope.json", tls = { ca = 1 } }
x = 1
"a b".card = "ftp://h/"

[limits]
keepalive_seconds = 200
request_bytes = -1
connections = true
stall_seconds = "long"
[log]
level = "warn"
format = 1
calls = 1979-05-27
"""


def test_all_mistakes_at_once(problems, tmp_path):
    name = (
        "an agent's name is made of a-z, 0-9 and single dashes between them, at most 63 characters"
    )
    bindings = 'must be one of "JSONRPC", "HTTP+JSON", "GRPC", not'
    assert problems(MANY) == [
        ("extra", 1, "unknown key; known here: listeners, admin, agents, publish, limits, log"),
        ("listener", 2, "unknown key; did you mean listeners?"),
        (
            "listeners[0].address",
            6,
            (
                '"0.0.0.0" is not a loopback address: other machines could call; that needs'
                " allow_remote = true, token and tls_cert_file"
            ),
        ),
        ("listeners[0].agent", 8, 'no agent "wether" is configured; did you mean weather?'),
        ("listeners[0].mode", 9, "only a Unix socket has a mode"),
        ("listeners[1].address", 11, "[admin] has this address already"),
        ("listeners[1].binding", 12, f'{bindings} "JSON-RPC"; did you mean JSONRPC?'),
        ("listeners[2].address", 13, "is required"),
        ("listeners[2].binding", 13, "is required"),
        ("agents.weather.card", 17, "a URL with credentials in it is not accepted"),
        (
            "agents.weather.connect_timeout_secs",
            18,
            "unknown key; did you mean connect_timeout_seconds?",
        ),
        ("agents.weather.max_streams", 19, "must be a whole number, not 1.5"),
        ("agents.weather.connect_timeout_seconds", 20, "must be a number, not inf"),
        ("agents.weather.prefer[1]", 22, f'{bindings} "grpc"; did you mean GRPC?'),
        ("agents.weather.prefer[2]", 23, "must be a string, not 3"),
        (
            "agents.weather.trusted_hosts[0]",
            25,
            'must be a host alone, without scheme, port or path, not "http://a"',
        ),
        (
            "agents.weather.token",
            27,
            f"unknown key; known here: {', '.join(AgentConfig.model_fields)}",
        ),
        (
            "agents.weather.tls.client_cert_file",
            29,
            f'file "{tmp_path}/nope.pem": No such file or directory',
        ),
        ("agents.weather.tls.client_cert_file", 29, "needs client_key_file beside it"),
        ("agents.card", 30, 'the name "card" is reserved'),
        ("agents.card.card", 30, "is required"),
        ("agents.Bad", 32, name),
        (
            "agents.Bad.card",
            32,
            (
                f'file "{tmp_path}/nope.json": No such file or directory'
                " (a URL begins with http:// or https://)"
            ),
        ),
        (
            "agents.Bad.tls.ca",
            32,
            "unknown key; known here: ca_file, client_cert_file, client_key_file, server_name",
        ),
        ("agents.x", 33, "must be a table, not 1"),
        ('agents."a b"', 34, name),
        (
            'agents."a b".card',
            34,
            'a card cannot be fetched over "ftp"; use http, https or file',
        ),
        ("limits.request_bytes", 38, "must be at least 1024, not -1"),
        ("limits.connections", 39, "must be a whole number, not true"),
        ("limits.stall_seconds", 40, 'must be a number, not "long"'),
        (
            "log.level",
            42,
            'must be one of "debug", "info", "warning", "error", not "warn"; did you mean warning?',
        ),
        ("log.format", 43, 'must be one of "text", "json", not 1'),
        ("log.calls", 44, "must be true or false, not a date or time"),
    ]


def test_the_printed_list(write):
    path = write("[log]\ncals = true\n\n[limits]\nconnections = 0\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == (
        f"{path}:2: log.cals: unknown key; did you mean calls?\n"
        f"{path}:5: limits.connections: must be at least 1, not 0"
    )


def test_no_message_repeats_a_secret(write):
    with pytest.raises(ConfigError) as caught:
        load(write(MANY))
    assert "hunter2" not in str(caught.value)


LISTENER = '[[listeners]]\naddress = "{}"\nbinding = "JSONRPC"\n'


@pytest.mark.parametrize(
    ("text", "key", "line", "message"),
    [
        (
            LISTENER.format("127.0.0.1:1") + LISTENER.format("localhost:1"),
            "listeners[1].address",
            5,
            "listeners[0] has this address already",
        ),
        (
            LISTENER.format("unix:/run/a") + LISTENER.format("unix:/run/./a"),
            "listeners[1].address",
            5,
            "listeners[0] has this address already",
        ),
        (
            LISTENER.format("[::1]:7420") + '[admin]\naddress = "[::1]:7420"\n',
            "listeners[0].address",
            2,
            "[admin] has this address already",
        ),
        (
            '[admin]\naddress = "127.0.0.1:7420"\n',
            "listeners[0].address",
            None,
            "[admin] has this address already",
        ),
        (
            "listeners = []\n",
            "listeners",
            1,
            "at least one is needed; without the key there is a default one",
        ),
        (
            '[listeners]\naddress = "127.0.0.1:1"\n',
            "listeners",
            1,
            "must be an array, not a table; write [[listeners]]",
        ),
        ("listeners = [1]\n", "listeners[0]", 1, "must be a table, not 1"),
        (
            LISTENER.format("127.0.0.1:1") + 'agent = "weather"\n',
            "listeners[0].agent",
            4,
            'no agent "weather" is configured',
        ),
        (
            LISTENER.format("127.0.0.1:1") + 'mode = "0660"\n',
            "listeners[0].mode",
            4,
            "only a Unix socket has a mode",
        ),
        (
            LISTENER.format("unix:/run/a") + "mode = 660\n",
            "listeners[0].mode",
            4,
            'must be a string of octal digits as "0660", not 660',
        ),
        (
            '[admin]\naddress = "unix:/run/a"\n',
            "admin.address",
            2,
            "must be HOST:PORT, nothing else is possible here",
        ),
        (
            '[agents.a]\ncard = "http://a"\ntls.client_key_file = "config.toml"\n',
            "agents.a.tls.client_key_file",
            3,
            "needs client_cert_file beside it",
        ),
        (
            "[limits]\nstall_seconds = 4\n",
            "limits.stall_seconds",
            2,
            "keepalive_seconds (4) must be below stall_seconds (4)",
        ),
        (
            "[limits]\nkeepalive_seconds = 121\n",
            "limits.keepalive_seconds",
            2,
            "keepalive_seconds (121) must be below stall_seconds (120)",
        ),
        ("agents = 1\n", "agents", 1, "must be a table, not 1"),
        ("[agents.a]\n", "agents.a.card", 1, "is required"),
        ("limits = []\n", "limits", 1, "must be a table, not an array"),
        (
            "[limits]\ndrain_seconds = 0\n",
            "limits.drain_seconds",
            2,
            "must be at least 0.001, not 0",
        ),
        (
            "[limits]\nstall_seconds = 1e9\n",
            "limits.stall_seconds",
            2,
            "must be at most 604800, not 1000000000",
        ),
        ("[limits]\ndrain_seconds = nan\n", "limits.drain_seconds", 2, "must be a number, not nan"),
        (
            "[limits]\nheader_bytes = 4095\n",
            "limits.header_bytes",
            2,
            "must be at least 4096, not 4095",
        ),
        (
            "[limits]\nevent_bytes = 2147483648\n",
            "limits.event_bytes",
            2,
            "must be at most 2147483647, not 2147483648",
        ),
        (
            '[limits]\nrequest_bytes = "1 MiB"\n',
            "limits.request_bytes",
            2,
            'must be a whole number, not "1 MiB"',
        ),
        (
            "[limits]\nbuffered_bytes = 1\n",
            "limits.buffered_bytes",
            2,
            "must be at least 1048576, not 1",
        ),
        (
            '[agents.a]\ncard = "http://a"\nproxy = "http://p"\n',
            "agents.a.proxy",
            3,
            "must be http://HOST:PORT",
        ),
        (
            '[agents.a]\ncard = "http://a"\n[agents.a.auth]\nbearer = "s3cret"\n',
            "agents.a.auth.bearer",
            4,
            "must be file:PATH, env:NAME or credential:NAME; secrets do not belong into this file",
        ),
        (
            (
                '[agents.a]\ncard = "http://a"\n[agents.a.auth]\nbearer = "env:T"\n'
                '[agents.a.auth.oauth]\ntoken_url = "https://t"\nclient_id = "env:I"\n'
                'client_secret = "env:S"\n'
            ),
            "agents.a.auth.bearer",
            4,
            "and oauth exclude each other",
        ),
        (
            (
                '[agents.a]\ncard = "http://a"\n[agents.a.auth]\nbearer = "env:T"\n'
                'headers = { Authorization = "env:A" }\n'
            ),
            "agents.a.auth.headers.Authorization",
            5,
            "and bearer exclude each other",
        ),
        (
            (
                '[agents.a]\ncard = "https://a"\n[agents.a.auth.oauth]\n'
                'token_url = "http://login.test/token"\nclient_id = "env:I"\n'
                'client_secret = "env:S"\n'
            ),
            "agents.a.auth.oauth.token_url",
            4,
            (
                'credentials would go to "login.test" in plaintext: use https, or name the host in'
                " trusted_hosts"
            ),
        ),
        (
            '[agents.a]\ncard = "http://a"\n[agents.a.discovery_auth]\nbearer = "env:T"\n',
            "agents.a.card",
            2,
            (
                'credentials would go to "a" in plaintext: use https, or name the host in'
                " trusted_hosts"
            ),
        ),
        (
            '[agents.a]\ncard = "http://a"\n[agents.a.auth.headers]\nhost = "env:T"\n',
            "agents.a.auth.headers.host",
            4,
            'the header "host" is set by the sidecar itself',
        ),
        (
            LISTENER.format("127.0.0.1:1") + "allow_uids = [1]\n",
            "listeners[0].allow_uids",
            4,
            "only a Unix socket tells who its callers are",
        ),
        (
            LISTENER.format("192.168.1.7:1") + 'allow_remote = true\ntoken = "env:T"\n',
            "listeners[0].allow_remote",
            4,
            "needs tls_cert_file",
        ),
        ("[publishing.a]\n", "publishing", 1, None),
        (
            "[agents.a]\ncard = 'http://a'\nverify_signatures = 1\n",
            "agents.a.verify_signatures",
            3,
            "must be true, false or a file with public keys, not 1",
        ),
        (
            "[agents.a]\ncard = 'http://a'\nverify_signatures = '/nowhere/keys'\n",
            "agents.a.verify_signatures",
            3,
            'file "/nowhere/keys": No such file or directory',
        ),
        (
            "[agents.a]\ncard = 'http://a'\ncard_sha256 = 'abc'\n",
            "agents.a.card_sha256",
            3,
            'must be 64 hexadecimal digits, not "abc"',
        ),
        ("[publish.a]\ncard = 'http://h'\n", "publish.a.address", 1, "is required"),
        (
            "[publish.a]\ncard = 'http://h'\naddress = '[::]:80'\nprob_interval_seconds = 1.0\n",
            "publish.a.prob_interval_seconds",
            4,
            "unknown key; did you mean probe_interval_seconds?",
        ),
        (
            "[publish.a]\ncard = 'http://h'\naddress = '[::]:80'\nmap = 7\n",
            "publish.a.map",
            4,
            "must be a table, not 7",
        ),
        (
            "[publish.a]\ncard = 'http://h'\naddress = '[::]:80'\nmap = { h = '127.0.0.1:1' }\n",
            "publish.a.map",
            4,
            "'h' is not an address: write HOST:PORT or http[s]://HOST[:PORT][/PATH]",
        ),
        (
            (
                "[publish.a]\ncard = 'http://h'\naddress = '[::]:80'\n[publish.a.tls]\n"
                "client_key_file = '/dev/null'\n"
            ),
            "publish.a.tls.client_key_file",
            5,
            "needs client_cert_file beside it",
        ),
        (
            f"[limits]\nconnections = {10**400}\n",
            "limits.connections",
            2,
            "must be at most 1000000, not 1" + "0" * 79 + "…",
        ),
        (
            f"[agents.a]\ncard = 'http://a'\nconnect_timeout_seconds = {10**400}\n",
            "agents.a.connect_timeout_seconds",
            3,
            "must be a number, not 1" + "0" * 79 + "…",
        ),
        ("[admin]\naddres = 1\n", "admin.addres", 2, "unknown key; did you mean address?"),
        ("[log]\nlevels = 1\n", "log.levels", 2, "unknown key; did you mean level?"),
        (
            '[agents.a]\ncard = "http://a"\nprefer = "GRPC"\n',
            "agents.a.prefer",
            3,
            'must be an array, not "GRPC"',
        ),
        (
            LISTENER.format("unix:/run/a") + "agent = 1\n",
            "listeners[0].agent",
            4,
            "must be a string, not 1",
        ),
        (
            LISTENER.format("systemd:a:b"),
            "listeners[0].address",
            2,
            '"a:b" is not a FileDescriptorName of a socket unit',
        ),
    ],
)
def test_one_mistake(problems, text, key, line, message):
    if message is None:
        ((found_key, found_line, found),) = problems(text)
        assert found.startswith("unknown key")
        assert (found_key, found_line) == (key, line)
    else:
        assert problems(text) == [(key, line, message)]


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("", "must be an http:// or https:// URL, a file: URL or a path"),
        ("http://a\\nb", "must be an http:// or https:// URL, a file: URL or a path"),
        ("https://user@h/", "a URL with credentials in it is not accepted"),
        ("https://u:p@h:port/", "a URL with credentials in it is not accepted"),
        ("https://u:p@[h/", "a URL with credentials in it is not accepted"),
        ("http://", "is not a valid URL"),
        ("http:///card.json", "is not a valid URL"),
        ("http://:80/", "is not a valid URL"),
        ("http://h:0/", "is not a valid URL"),
        ("http://h:99999/", "is not a valid URL"),
        ("http://h:x/", "is not a valid URL"),
        ("http://[::1/", "is not a valid URL"),
        ("http://h/a b", "is not a valid URL"),
        ("http://h/#x", "a URL with a fragment (#...) is not accepted"),
        ("ws://h/", 'a card cannot be fetched over "ws"; use http, https or file'),
        ("file://host/x", "a file: URL is file:///PATH, without host, query and fragment"),
        ("file:///x?y", "a file: URL is file:///PATH, without host, query and fragment"),
        ("file:x", "a file: URL needs an absolute path; write a relative one without file:"),
        ("file:///no/such", 'file "/no/such": No such file or directory'),
        ("file:///", 'file "/": Is a directory'),
    ],
)
def test_wrong_cards(problems, card, message):
    assert problems(f'[agents.a]\ncard = "{card}"\n') == [("agents.a.card", 2, message)]


def test_a_card_without_scheme_is_told_of_schemes(problems):
    ((key, line, message),) = problems('[agents.a]\ncard = "localhost:9000"\n')
    assert (key, line) == ("agents.a.card", 2)
    # A long path is cut, so only its ends are sure.
    assert message.startswith('file "/')
    assert message.endswith(": No such file or directory (a URL begins with http:// or https://)")


def test_ports_that_the_system_chooses_do_not_collide(write):
    text = LISTENER.format("127.0.0.1:0") * 2 + '[admin]\naddress = "127.0.0.1:0"\n'
    assert len(load(write(text)).listeners) == 2


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (b"[log]\nlevel = \n", 2, "not valid TOML: Invalid value"),
        (b"[log]\n[log]\n", 2, "not valid TOML: Cannot declare"),
        (b"[log]\ncalls = true\ncalls = true\n", 3, "not valid TOML: Cannot overwrite"),
        (b"[log]\n\n\xff = 1\n", 3, "not UTF-8 text"),
        (b"a = " + b"[" * 100_000, None, "not valid TOML: nested too deeply"),
        (b"a = " + b"1" * 5_000, None, "not valid TOML: Exceeds the limit"),
    ],
)
def test_what_is_no_toml(problems, text, line, words):
    ((key, found_line, message),) = problems(text)
    assert (key, found_line) == ("", line)
    assert message.startswith(words)


def test_a_file_that_cannot_be_read(tmp_path):
    for path, reason in (
        (tmp_path / "none.toml", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert str(caught.value) == f"{path}: cannot be read: {reason}"


# --- without a file ---------------------------------------------------------------------------


def test_agents_from_the_command_line():
    config = from_agents(["weather=http://127.0.0.1:9000", "search=https://h/card?x=y"])
    assert config == Config(
        agents={
            "weather": AgentConfig(card="http://127.0.0.1:9000"),
            "search": AgentConfig(card="https://h/card?x=y"),
        }
    )
    assert list(config.agents) == ["weather", "search"]


def test_mistakes_on_the_command_line_come_at_once():
    with pytest.raises(ConfigError) as caught:
        from_agents(["weather", "a=http://h", "a=http://i", "Q=ftp://h"])
    lines = str(caught.value).splitlines()
    assert lines[0] == '--agent: "weather" must be NAME=CARD_URL'
    assert lines[1] == "--agent: agents.a: given twice"
    assert lines[2].startswith("--agent: agents.Q: an agent's name")
    assert lines[3].startswith("--agent: agents.Q.card: a card cannot be fetched")
    assert len(lines) == 4


# --- what is written --------------------------------------------------------------------------


def test_the_effective_configuration_is_the_configuration(write, tmp_path):
    odd = 'odd " \\ é\t\x7f.pem'
    for name in (odd, "k.pem"):
        (tmp_path / name).touch()
    config = load(
        write("""
[[listeners]]
address = "unix:/run/a.sock"
binding = "JSONRPC"
mode = "0600"
agent = "b"
[[listeners]]
address = "localhost:7420"
binding = "JSONRPC"
[agents.b]
card = "http://h"
prefer = ["GRPC"]
trusted_hosts = ["a", "h"]
proxy = "http://proxy:3128"
[agents.b.auth]
headers = { X-Key = "env:KEY" }
oauth = { token_url = "https://t/token", client_id = "env:I", client_secret = "credential:s" }
[agents.b.discovery_auth]
bearer = "env:T"
[agents.b.tls]
client_cert_file = "odd \\" \\\\ é\\t\\u007f.pem"
client_key_file = "k.pem"
[agents.a]
card = "http://i"
verify_signatures = "k.pem"
card_sha256 = "6E340B9CFFB37A989CA544E6BB780A2C78901D3FB33738768511A30617AFA01D"
[publish.c]
card = "http://j"
address = "0.0.0.0:80"
map = { "https://public.example/a" = "127.0.0.1:1" }
[publish.c.auth]
bearer = "env:T"
[publish.c.tls]
server_name = "h"
[limits]
drain_seconds = 0.25
""")
    )
    text = effective(config)
    assert load(write(text)) == config
    assert list(tomli.loads(text)["agents"]) == ["b", "a"]
    every = tomli.loads(effective(load(write('[agents.b]\ncard = "http://h"\n'))))
    assert set(every["limits"]) == set(Limits.model_fields)
    tables = {"tls", "auth", "discovery_auth"}
    without_default = {"proxy", "card_sha256"}
    assert set(every["agents"]["b"]) == set(AgentConfig.model_fields) - tables - without_default


def test_the_schema_is_for_the_file():
    found = schema()
    assert set(found["properties"]) == set(Config.model_fields)
    tables = found["$defs"]
    assert tables["ListenerConfig"]["properties"]["mode"]["default"] == "0660"
    assert tables["ListenerConfig"]["required"] == ["address", "binding"]
    assert tables["AdminConfig"]["properties"]["address"]["default"] == "127.0.0.1:7429"
    assert tables["LogConfig"]["properties"]["level"]["enum"][0] == "debug"
    for table in (found, *tables.values()):
        assert table["additionalProperties"] is False


# --- the example ------------------------------------------------------------------------------

MODELS = (
    ListenerConfig,
    AdminConfig,
    AgentConfig,
    TlsConfig,
    AuthConfig,
    OAuthConfig,
    PublishConfig,
    Limits,
    LogConfig,
)


def test_the_example_loads_and_shows_every_key():
    text = EXAMPLE.read_text("utf-8")
    config = load(EXAMPLE)
    assert config.agents
    for model in MODELS:
        for key in model.model_fields:
            shown = rf"^(# )?{key} += |^(# )?\[agents\..*{key}\]"
            assert re.search(shown, text, re.MULTILINE), key


def test_the_example_names_no_key_that_does_not_exist():
    known = {key for model in MODELS for key in model.model_fields}
    found = re.findall(r"^(?:# )?(\w+) += ", EXAMPLE.read_text("utf-8"), re.MULTILINE)
    assert set(found) <= known


def test_what_the_example_has_in_comments_is_the_default(write):
    text = EXAMPLE.read_text("utf-8")
    # Files have no default, and the second listener is an example of its own.
    examples = "server_name|proxy|card_sha256|allow_|advertise|token|headers|bearer|client_|scopes|resource"
    defaults = rf"^# (?!\w+_file|{examples})(\w+ = |\[\[)"
    plain = re.sub(defaults, r"\1", text, flags=re.MULTILINE)
    assert plain != text
    spelled, example = load(write(plain)), load(EXAMPLE)
    assert spelled.agents == example.agents
    assert spelled.limits == example.limits
    assert spelled.log == example.log
    assert spelled.admin == example.admin
    assert spelled.publish == example.publish
    assert spelled.listeners[0] == example.listeners[0] == Config().listeners[0]
    assert spelled.listeners[1].mode == 0o660
