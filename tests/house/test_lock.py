"""What `make lock` writes: names as the index spells them, sorted, without local labels."""

from __future__ import annotations

import runpy

import pytest


@pytest.fixture
def pins(root):
    return runpy.run_path(str(root / "tools" / "lock.py"))["pins"]


def test_names_are_normalized_and_sorted_and_labels_dropped(pins):
    freeze = "typing_extensions==4.1\ntorch==2.13.0+cpu\nJinja2==3.1.6\nA.b==1.0.post1\n"
    assert pins(freeze) == ["a-b==1.0.post1", "jinja2==3.1.6", "torch==2.13.0", "typing-extensions==4.1"]


@pytest.mark.parametrize("line", ["-e git+https://example.org/x#egg=x", "x @ file:///x.whl", "# a comment"])
def test_a_package_without_a_version_is_refused(pins, line):
    with pytest.raises(ValueError, match="without a version"):
        pins(f"numpy==2.0\n{line}\n")
