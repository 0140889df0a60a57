"""The family of errors: one base, one form, and the builtins that other code would catch."""

from __future__ import annotations

import inspect

import pytest

from crossfade import errors
from crossfade.errors import CrossfadeError, CrossfadeWarning

BUILTINS = {
    "SelectionError": ValueError,
    "PlanError": ValueError,
    "StudentError": ValueError,
    "OutputError": TypeError,
    "StateError": RuntimeError,
    "NonFiniteError": ArithmeticError,
    "PersistError": ValueError,
}


def test_that_the_family_is_complete_and_exported():
    found = {
        name for name, thing in vars(errors).items() if inspect.isclass(thing) and thing.__module__ == errors.__name__
    }
    assert found == set(errors.__all__) == {*BUILTINS, "CrossfadeError", "CrossfadeWarning"}


@pytest.mark.parametrize("name", BUILTINS)
def test_that_each_leaf_is_caught_as_crossfade_error_and_as_its_builtin(name):
    kind = getattr(errors, name)
    for base in (CrossfadeError, BUILTINS[name]):
        with pytest.raises(base):
            raise kind("no.")


def test_that_the_parts_come_in_one_order_whatever_the_order_of_the_arguments():
    error = CrossfadeError("It broke.", do="mend it", got=3, where="blocks.0", expected=4)
    assert str(error) == "It broke.\n  where: blocks.0\n  expected: 4\n  got: 3\n  what to do: mend it"


def test_that_absent_parts_leave_no_line_but_falsy_ones_do():
    assert str(CrossfadeError("It broke.")) == "It broke."
    assert str(CrossfadeError("It broke.", got=0, expected="")) == "It broke.\n  expected: \n  got: 0"


def test_that_the_parts_are_keywords():
    with pytest.raises(TypeError):
        CrossfadeError("It broke.", "expected")


def test_that_the_warning_can_be_filtered_as_a_user_warning():
    assert issubclass(CrossfadeWarning, UserWarning)
    assert not issubclass(CrossfadeWarning, CrossfadeError)
