# SPDX-License-Identifier: GPL-2.0-or-later
"""For tests of pytest with the fixture lab that run on arm64 or on both architectures.

Tests without a mark of these run on x86-64 alone.
"""
import pytest


def _name(value):
    return getattr(value, "__name__", str(value))


def _param(arch, names, value, quick):
    marks = ()
    if hasattr(value, "marks"):     # a pytest.param
        marks = tuple(value.marks)
        value = value.values if len(names) > 1 else value.values[0]
    words = value if isinstance(value, tuple) else (value,)
    name = "-".join(map(_name, words))
    if arch == "x86_64":
        return pytest.param(arch, *words, marks=marks, id=name or arch)
    # With pytest-xdist, one worker runs all of them: L1 for arm64 boots once.
    marks += (pytest.mark.xdist_group(arch),)
    if quick is not True and value not in quick:
        marks += (pytest.mark.slow,)
    return pytest.param(arch, *words, marks=marks, id=f"{arch}-{name}" if name else arch)


def _parametrize(arches, names, values, quick):
    names = names.split(", ") if names else []
    params = [_param(arch, names, value, quick) for value in values for arch in arches]
    return pytest.mark.parametrize(["lab", *names], params, indirect=["lab"])


def on_both(names="", values=((),), quick=()):
    """As parametrize(names, values), on x86-64 and on arm64. On arm64 a test is slow, except for
    the values in quick; True stands for all."""
    return _parametrize(("x86_64", "aarch64"), names, values, quick)


def on_aarch64(names="", values=((),), quick=()):
    """The same on arm64 alone."""
    return _parametrize(("aarch64",), names, values, quick)
