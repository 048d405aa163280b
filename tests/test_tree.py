"""What holds for the files of the tree, whatever is in them."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
MODULE_LINES = 525  # about 500

# Vocabulary: values and protocols without behaviour of their own.
WITHOUT_TESTS = {"__init__", "types", "spec", "exchange", "http2_engine", "h2_frames"}
# Tested with their only users, over whole connections and conversions.
TESTED_ELSEWHERE = {"http2_link", "http2_fields", "protojson_write"}

# In two parts each, so that this file does not find itself.
MACHINE_PATHS = [
    first + last
    for first, last in [("/wo", "rk/"), ("/tmp/", "a2a"), ("/ro", "ot/"), ("/op", "t/")]
]


def tree_files():
    """Files under version control, and those that could be added."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    names = listed.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def modules(package):
    return sorted(path for path in (ROOT / package).rglob("*.py") if "_pb" not in path.parts)


def test_modules_are_of_a_readable_size():
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for path in modules("sidecar")
    }
    assert sizes, "no modules found"
    assert {name: size for name, size in sizes.items() if size > MODULE_LINES} == {}


@pytest.mark.parametrize("package", ["core", "wire"])
def test_every_module_has_its_test_file(package):
    names = {path.stem for path in modules(f"sidecar/{package}")} - WITHOUT_TESTS - TESTED_ELSEWHERE
    tests = {
        path.stem.removeprefix("test_") for path in (ROOT / "tests" / package).glob("test_*.py")
    }
    assert names, "no modules found"
    assert sorted(names - tests) == []


def test_no_paths_of_a_machine():
    found = []
    for path in tree_files():
        text = path.read_bytes()
        found += [
            (str(path.relative_to(ROOT)), word) for word in MACHINE_PATHS if word.encode() in text
        ]
    assert found == []


@pytest.mark.parametrize(
    "name", ["config.toml", "LICENSE", "README.md", "Makefile", "sidecar/_pb/a2a_pb2.py"]
)
def test_files_that_others_rely_on(name):
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("name", [".ci/run", "proto/generate"])
def test_scripts_can_be_run(name):
    assert os.access(ROOT / name, os.X_OK)


# --- the locks --------------------------------------------------------------------------------

LOCKS = ["requirements.lock", "runtime.lock"]


def lock_lines(name):
    lines = (ROOT / ".ci" / name).read_text("utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def pins(name):
    """Canonical name to requirement, each of one exact version."""
    found = [line.removesuffix("\\") for line in lock_lines(name) if not line.startswith(" ")]
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, found)}


@pytest.mark.parametrize("name", LOCKS)
def test_locks_have_versions_and_hashes_only(name):
    lines = lock_lines(name)
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith(" "):
            assert line.startswith("    --hash=sha256:")
        else:
            assert not line.startswith("-")
            assert "://" not in line
            assert following.startswith("    --hash=sha256:")
    for pin in pins(name).values():
        assert [spec.operator for spec in pin.specifier] == ["=="]


def declared(groups):
    """Requirements of pyproject.toml: the project's own and those of dependency groups."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wanted = [Requirement(text) for text in project["project"]["dependencies"]]
    for group in groups:
        entries = project["dependency-groups"][group]
        wanted += [Requirement(entry) for entry in entries if isinstance(entry, str)]
    return wanted


@pytest.mark.parametrize(
    ("name", "groups"), [("requirements.lock", ["lint", "test", "build"]), ("runtime.lock", [])]
)
def test_locks_have_what_the_project_asks_for(name, groups):
    """When this fails after a change of pyproject.toml: make lock."""
    locked = pins(name)
    for wanted in declared(groups):
        pin = locked[canonicalize_name(wanted.name)]
        (version,) = [spec.version for spec in pin.specifier]
        assert wanted.specifier.contains(version), wanted


def test_both_locks_have_the_same_versions():
    everything = pins("requirements.lock")
    assert {name: pin.specifier for name, pin in pins("runtime.lock").items()}.items() <= {
        name: pin.specifier for name, pin in everything.items()
    }.items()
