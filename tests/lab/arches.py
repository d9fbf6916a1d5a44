# SPDX-License-Identifier: GPL-2.0-or-later
"""Marks for tests of pytest with the fixture lab or place: tests that run on arm64 or on both architectures, and tests
that also run with the other kernel interface.

Tests without such a mark only run on x86-64, with the chosen interface: exit-on-missing.
"""
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import pytest
from allpairspy import AllPairs

from tests.lab import kvm_interface

FIRST = kvm_interface.chosen()
SECOND, = (name for name in kvm_interface.ALL if name != FIRST)

Quick = Collection[Any] | Literal[True]
Mark = Callable[[Callable[..., None]], Any]


def both_interfaces(test: Callable[..., None]) -> Any:
    """For a test of accel/kvm. Its cases of make check also run with the interface that was not chosen, or all its
    cases if make check has none. These additional cases are slow; cases without exits have none."""
    values = [FIRST, pytest.param(SECOND, marks=pytest.mark.slow)]
    return pytest.mark.usefixtures("by")(pytest.mark.parametrize("by", values, indirect=True)(test))


def _param(arch: str, names: list[str], value: Any, quick: Quick) -> Any:
    marks: tuple[Any, ...] = ()
    if hasattr(value, "marks"):     # a pytest.param
        marks = tuple(value.marks)
        value = value.values if len(names) > 1 else value.values[0]
    words = value if isinstance(value, tuple) else (value,)
    name = "-".join(str(getattr(word, "__name__", word)) for word in words)
    if arch == "x86_64":
        return pytest.param(arch, *words, marks=marks, id=name or arch)
    marks += (pytest.mark.aarch64,)
    if quick is not True and value not in quick:
        marks += (pytest.mark.slow,)
    return pytest.param(arch, *words, marks=marks, id=f"{arch}-{name}" if name else arch)


def _parametrize(arches: dict[str, Iterable[Any]], names: str, quick: Quick) -> Mark:
    words = names.split(", ") if names else []
    params = [_param(arch, words, value, quick) for arch, values in arches.items() for value in values]

    def mark(test: Callable[..., None]) -> Any:
        where = "place" if "place" in inspect.signature(test).parameters else "lab"
        return pytest.mark.parametrize([where, *words], params, indirect=[where])(test)
    return mark


def choices(*axes: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Values for on_both() or parametrize(): quick, and slow combinations of one value per axis, so that each pair of
    values occurs: the soak draws all combinations."""
    others = AllPairs([list(axis) for axis in axes], previously_tested=[list(value) for value in quick])
    return [*quick, *(pytest.param(*value, marks=pytest.mark.slow) for value in others)]


def listed(*values: Any, quick: Collection[Any]) -> list[Any]:
    """Values for on_both() or parametrize(): these values or combinations. Those that are not in quick are slow."""
    def slow(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
    return [value if value in quick else slow(value) for value in values]


def on_both(names: str = "", values: Iterable[Any] = ((),), quick: Quick = ()) -> Mark:
    """Like parametrize(names, values) on x86-64; on arm64 only with the values in quick, or else, slow, with the first
    one: what arm64 decides does not depend on the others. True stands for all."""
    values = list(values)
    chosen = values if quick is True else [value for value in values if value in quick]
    return _parametrize({"x86_64": values, "aarch64": chosen or values[:1]}, names, quick)


def on_aarch64(names: str = "", values: Iterable[Any] = ((),), quick: Quick = ()) -> Mark:
    """Like parametrize(names, values), on arm64. Tests are slow, but for the values in quick; True stands for all."""
    return _parametrize({"aarch64": values}, names, quick)
