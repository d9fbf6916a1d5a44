# SPDX-License-Identifier: GPL-2.0-or-later
"""For tests of pytest that run in both labs."""
import pytest

# With pytest-xdist, one worker runs all of them: L1 for arm64 boots once.
IN_AARCH64 = pytest.mark.xdist_group("aarch64")


def _name(value):
    return getattr(value, "__name__", str(value))


def on_both(names="", values=((),), quick=()):
    """As parametrize(names, values) for tests with the fixture lab, on x86-64 and on arm64.

    Those of arm64 are slow, except for the values in quick; it is True for all.
    """
    names = [name.strip() for name in names.split(",") if name.strip()]
    params = []
    for value in values:
        marks = ()
        if hasattr(value, "marks"):
            marks = value.marks
            value = value.values[0] if len(names) == 1 else value.values
        words = value if isinstance(value, tuple) else (value,)
        slow = () if quick is True or value in quick else (pytest.mark.slow,)
        text = "-".join(map(_name, words))
        params += [
            pytest.param("x86_64", *words, marks=marks, id=text or "x86_64"),
            pytest.param("aarch64", *words, marks=(*marks, *slow, IN_AARCH64),
                         id="-".join(filter(None, ("aarch64", text)))),
        ]
    return pytest.mark.parametrize(["lab", *names], params, indirect=["lab"])


def on_aarch64(test):
    """A test with the fixture lab, on arm64 alone."""
    return IN_AARCH64(pytest.mark.parametrize("lab", ["aarch64"], indirect=True)(test))
