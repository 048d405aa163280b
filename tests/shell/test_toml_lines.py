"""Lines of keys in TOML texts, in every way that TOML has of writing them."""

import tomli
from hypothesis import given
from hypothesis import strategies as st

from sidecar.toml_lines import line_of, locate

EVERYTHING = '''\
# [not.a.table]
top = 1 # = 2
a.b . "c.d" = """
x = 1
[y]
\\""" z = 2 """"
dates = [1979-05-27 07:32:00Z, 07:32:00,
  # ] not the end
  1979-05-27,
]

[ table . 'quo"ted' ]
x = '[ { # "'
y = { one = 1, two = { three = [ 3,
  4 ] }, "f\\u006fur" = "}" }
z = \'\'\'
q = 'a'
\'\'\'

[[rows]] # first
n = -1.5e3
[rows.sub]
k = true
[[rows]]
[[rows.deep]]
d = 0x1F
[[rows.deep]]
d = inf
'''


def test_every_form():
    lines = locate(EVERYTHING)
    assert lines == {
        ("top",): 2,
        ("a",): 3,
        ("a", "b"): 3,
        ("a", "b", "c.d"): 3,
        ("dates",): 7,
        ("dates", 0): 7,
        ("dates", 1): 7,
        ("dates", 2): 9,
        ("table",): 12,
        ("table", 'quo"ted'): 12,
        ("table", 'quo"ted', "x"): 13,
        ("table", 'quo"ted', "y"): 14,
        ("table", 'quo"ted', "y", "one"): 14,
        ("table", 'quo"ted', "y", "two"): 14,
        ("table", 'quo"ted', "y", "two", "three"): 14,
        ("table", 'quo"ted', "y", "two", "three", 0): 14,
        ("table", 'quo"ted', "y", "two", "three", 1): 15,
        ("table", 'quo"ted', "y", "four"): 15,
        ("table", 'quo"ted', "z"): 16,
        ("rows",): 20,
        ("rows", 0): 20,
        ("rows", 0, "n"): 21,
        ("rows", 0, "sub"): 22,
        ("rows", 0, "sub", "k"): 23,
        ("rows", 1): 24,
        ("rows", 1, "deep"): 25,
        ("rows", 1, "deep", 0): 25,
        ("rows", 1, "deep", 0, "d"): 26,
        ("rows", 1, "deep", 1): 27,
        ("rows", 1, "deep", 1, "d"): 28,
    }
    assert set(lines) == paths(tomli.loads(EVERYTHING))


def test_windows_line_ends_count_once():
    assert locate("a = 1\r\n\r\nb = 2\r\n") == {("a",): 1, ("b",): 3}


def test_a_missing_key_has_the_line_of_its_table():
    lines = locate("\n[agents.weather]\nenabled = true\n")
    assert line_of(lines, ("agents", "weather", "card")) == 2
    assert line_of(lines, ("agents", "weather", "enabled")) == 3
    assert line_of(lines, ("limits", "x")) is None


def paths(value, path=()):
    """Every table, key and element of parsed TOML."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = set()
    for key, inner in items:
        found.add((*path, key))
        if isinstance(inner, dict | list):
            found |= paths(inner, (*path, key))
    return found


VALUES = st.sampled_from(
    [
        "1",
        '"a # b"',
        "'\\'",
        '""',
        '""""""',
        '"""\n"a" ""b\n[x]\n"""',
        '"""a"""""',
        "'''\n'\n'''''",
        "[\n1, # ]\n2]",
        "[]",
        "[ [ ], [ 1,\n], ]",
        "{}",
        "{ k = [ { l = 1 } ] }",
        "1979-05-27 07:32:00.5+01:00",
        '"\\"\\\\"',
    ]
)


@given(
    tables=st.lists(
        st.tuples(st.sampled_from(["[{}]", "[[{}]]", "[x.{}]"]), st.lists(VALUES, max_size=3)),
        max_size=5,
    )
)
def test_any_mixture(tables):
    text, expected = "", {}
    for number, (header, values) in enumerate(tables):
        name = f"t{number}"
        table = {"[{}]": (name,), "[[{}]]": (name, 0), "[x.{}]": ("x", name)}[header]
        expected[table] = text.count("\n") + 1
        text += header.format(name) + "\n"
        for position, value in enumerate(values):
            expected[(*table, f"k{position}")] = text.count("\n") + 1
            text += f"k{position} = {value} # comment\n"
    lines = locate(text)
    assert set(lines) == paths(tomli.loads(text))
    assert {path: lines[path] for path in expected} == expected
