"""Claims about recipes/calculator.py: the tool calculates, and executes nothing else. And about
docs/qwen3_turns.jinja: an episode with the tool has the form that Qwen3 knows."""

from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from models import hf
from recipes.calculator import Calculator

REPO = Path(__file__).resolve().parent.parent

VALUES = {
    "2 + 3 * 4": "14",
    "(2 + 3) * 4": "20",
    "2 - 3 - 4": "-5",
    "-(1.5) + +2": "0.5",
    "6 / 3": "2",
    "7 / 2": "3.5",
    "2 / 3": "0.666666666667",
    "0.1 + 0.2": "0.3",
    " 48 / 2 ": "24",
    "999999999999 * 999999999999": "999999999998000000000001",
    "(" * 99 + "1" + ")" * 99: "1",
    "-" * 199 + "1": "-1",
}
REFUSED = [
    "",
    "2 **",
    "9 ** 9 ** 9",
    "9 // 2",
    "1,000 + 1",
    "$5",
    "2 × 3",
    "True",
    "1j",
    "'ab' * 3",
    "[1][0]",
    "x",
    "abs(-1)",
    "(1).real",
    "(lambda: 1)()",
    "x := 1",
    "__import__('os').system('ls')",
    "(" * 200,
    "1\0",
]


@pytest.mark.parametrize("expression, value", VALUES.items())
def test_an_expression_has_the_value_of_arithmetic(expression: str, value: str) -> None:
    calculator = Calculator()
    calculator.reset(question="2+2?", answer="#### 4")
    assert calculator.calculate(expression) == value


@pytest.mark.parametrize("expression", REFUSED)
def test_nothing_but_numbers_and_operators_is_accepted(expression: str) -> None:
    with pytest.raises(ValueError, match=r"^write only numbers, \+ - \* / and parentheses$"):
        Calculator().calculate(expression)


def test_an_expression_that_is_too_long_is_not_even_read() -> None:
    assert Calculator().calculate("1" * 200) == "1" * 200
    with pytest.raises(ValueError, match=r"^the expression is longer than 200 characters$"):
        Calculator().calculate("1" * 201)


def test_a_division_by_zero_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$"):
        Calculator().calculate("1 / (2 - 2)")


def test_chat_templates_describe_the_tool_by_its_docstring() -> None:
    assert get_json_schema(Calculator().calculate) == {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculates with numbers, + - * / and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": 'What to calculate, such as "(17 + 3) * 2.5".',
                    }
                },
                "required": ["expression"],
            },
            "return": {"type": "string", "description": 'The value, such as "50".'},
        },
    }


EPISODE = """\
<|im_start|>system
Be brief.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"name": "calculate"}
{"name": "look"}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
Twice 21?<|im_end|>
<|im_start|>assistant
<think>
I calculate.
</think>

<tool_call>
{"name": "calculate", "arguments": {"expression": "2 * 21"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
42
</tool_response>
<tool_response>
A second answer.
</tool_response><|im_end|>
<|im_start|>assistant
<think>
Done.
</think>

42<|im_end|>
<|im_start|>user
Sure?<|im_end|>
<|im_start|>assistant
"""


def test_the_template_for_qwen3_writes_an_episode_and_keeps_every_turn_of_the_model() -> None:
    tokenizer = hf.load_tokenizer(REPO / "tiny", str(REPO / "docs" / "qwen3_turns.jinja"))
    turns = EPISODE.split("<|im_start|>assistant\n")
    first, second = (turn.partition("<|im_end|>")[0] for turn in turns[1:3])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Twice 21?"},
        {"role": "assistant", "content": first},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "A second answer."},
        {"role": "assistant", "content": second},
        {"role": "user", "content": "Sure?"},
    ]
    how = {"tokenize": False, "add_generation_prompt": True}
    how["tools"] = [{"name": "calculate"}, {"name": "look"}]
    assert tokenizer.apply_chat_template(messages, **how) == EPISODE
