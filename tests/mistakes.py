"""What the tests of mistakes of a user share."""

from collections.abc import Callable

import pytest
from runs import few_examples

from config import Config
from infra.mistakes import UserMistake
from startup import set_up


def refused(call: Callable, *parts: str) -> None:
    """The call raises a UserMistake of one line that contains the parts."""
    with pytest.raises(UserMistake) as error:
        call()
    for part in parts:
        assert part in str(error.value) and "\n" not in str(error.value)


def few() -> dict[str, str]:
    return {"DATASET": str(few_examples(32, 32))}


def mistake_of(**env: str) -> str:
    """The mistake that the inputs of a run with these settings have, in its single line."""
    with pytest.raises(UserMistake) as error:
        set_up(Config.from_env(few() | env))
    assert "\n" not in str(error.value)
    return str(error.value)
