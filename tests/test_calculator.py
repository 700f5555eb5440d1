"""Claims about recipes/calculator.py: the tool calculates, and executes nothing else."""

import re

import pytest

from recipes.calculator import Calculator

VALUES = {
    "2 + 3 * 4": "14",
    "(2 + 3) * 4": "20",
    "2 - 3 - 4": "-5",
    "6 / 3": "2",
    "2 / 3": "0.666666666667",
    "0.1 + 0.2": "0.3",
    "999999999999 * 999999999999": "999999999998000000000001",
    "(" * 99 + "1" + ")" * 99: "1",
    "-" * 199 + "1": "-1",
    "1" * 200: "1" * 200,
}
NO_ARITHMETIC = [
    "",
    "2 **",
    "9 ** 9 ** 9",
    "1,000 + 1",
    "$5",
    "2 × 3",
    "'ab' * 3",
    "x",
    "abs(-1)",
    "(lambda: 1)()",
    "__import__('os').system('ls')",
    "(" * 200,
    "1\0",
]
REFUSED = dict.fromkeys(NO_ARITHMETIC, "write only numbers, + - * / and parentheses")
REFUSED |= {
    "1" * 201: "the expression is longer than 200 characters",  # it is not even read
    "1 / (2 - 2)": "division by zero",
}


@pytest.mark.parametrize("expression, value", VALUES.items())
def test_an_expression_has_the_value_of_arithmetic(expression: str, value: str) -> None:
    calculator = Calculator()
    calculator.reset(question="2+2?", answer="#### 4")
    assert calculator.calculate(expression) == value


@pytest.mark.parametrize("expression, line", REFUSED.items())
def test_nothing_but_short_expressions_of_numbers_and_operators_with_a_value_is_accepted(
    expression: str, line: str
) -> None:
    with pytest.raises((ValueError, ZeroDivisionError), match=f"^{re.escape(line)}$"):
        Calculator().calculate(expression)
