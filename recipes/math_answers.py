r"""Rewards answers in LaTeX, such as \frac{3}{4}, by math-verify.

    pip install math-verify
    REWARD_FN=recipes/math_answers.py:math_correct python train_grpo.py

`python recipes/math_answers.py runs/easy_math` writes easy questions with such answers, and prints
the command that trains on them.
"""

import argparse
import functools
import itertools
import json
import shlex
import sys
from decimal import Decimal
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from rewards import Rewards, marked_answer, without_open_thought

try:
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; pip install math-verify") from None

SECONDS_FOR_EACH_COMPLETION = 2  # parse and verify may take a second each
LONGEST = 300  # characters of an answer; longer ones would take long to parse
Chat = str | list[dict[str, str]]  # a text, or a list of messages


def math_correct(
    completions: list[Chat], answer: list[str], prompts: list[Chat], **columns: list
) -> Rewards:
    r"""Gives 1.0 to a completion whose answer equals the right answer by math-verify, else 0.0.

    answer: LaTeX, a solution with \boxed{}, or GSM8K's. The reward is None where it has no value.
    """
    rewards: Rewards = []
    for completion, right, prompt in zip(completions, answer, prompts, strict=True):
        expected = parse_latex(marked_answer(right) or right.rpartition("####")[2])
        text = answer_text(text_of(completion), "Answer:" in text_of(prompt)) or ""
        values = parse_latex(text) if len(text) <= LONGEST else []
        is_right = verify(expected, values, timeout_seconds=1)
        rewards.append(float(is_right) if expected else None)
    return rewards


def extract_answer(text: str) -> str | None:
    r"""One text for equal answers, which maj@n counts: 0.5 for \frac{1}{2}, 1/2 and x=\dfrac12."""
    answer = answer_text(text)
    return answer and canonical(answer)


@functools.lru_cache(maxsize=10_000)
def canonical(answer: str) -> str:
    """The value of an answer as a text, a number to 6 digits as math-verify compares it. An answer
    without a value, or whose value takes more than a second, is itself."""
    values = parse_latex(answer) if len(answer) <= LONGEST else []
    value = values[0] if values else answer
    if getattr(value, "is_Equality", False) and value.lhs.is_Symbol:
        value = value.rhs
    try:
        if not getattr(value, "is_number", False):
            return str(value)
        number = round(Decimal(str(timeout(1)(value.evalf)(28))), 6)
        return f"{number.normalize() + 0:f}"
    except (TimeoutException, Exception):  # SymPy raises many for what it cannot calculate.
        return answer


def answer_text(text: str, asks_for_line: bool = True) -> str | None:
    r"""The text of the last closed <answer>, else of the last closed \boxed{}, else what stands
    after the last "Answer:", for a question that asks for this line. None if it is blank."""
    text = without_open_thought(text)
    answer = marked_answer(text)
    if answer is None and asks_for_line and "Answer:" in text:
        answer = text.rpartition("Answer:")[2].strip("* \n").partition("\n")[0].rstrip("* ")
    return (answer or "").strip().removesuffix(".") or None


@functools.lru_cache(maxsize=10_000)
def parse_latex(text: str) -> list:
    r"""The values of the text, which needs no $; [] if it has none. Without \boxed{} math-verify
    would read its last number."""
    text = text.replace("\u2044", "/")  # 1⁄2
    return parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=1)


def text_of(chat: Chat) -> str:
    return chat if isinstance(chat, str) else "\n".join(message["content"] for message in chat)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write 160 questions and 40 held-out ones.")
    parser.add_argument("folder", type=Path, help="Folder of train.jsonl and test.jsonl.")
    folder, pairs = parser.parse_args().folder, []
    for a, b in itertools.product(range(2, 7), range(26, 36)):
        pairs += [
            (rf"What is $\frac{{{a}}}{{43}} + \frac{{{b}}}{{43}}$?", rf"\frac{{{a + b}}}{{43}}"),
            (f"Simplify ${a}x + {b} + x$.", f"{a + 1}x+{b}"),
            (rf"Simplify $\sqrt{{{b}}} + {a}\sqrt{{{b}}}$.", rf"{a + 1}\sqrt{{{b}}}"),
            (rf"Write ${a} < x \le {b}$ as an interval.", f"({a},{b}]"),
        ]
    lines = [json.dumps({"problem": text, "answer": right}) + "\n" for text, right in pairs]
    folder.mkdir(parents=True, exist_ok=True)
    train = [line for i, line in enumerate(lines) if i % 5]
    for name, part in {"train": train, "test": lines[::5]}.items():
        (folder / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
        print(f"{folder / name}.jsonl has {len(part)} questions")
    script = Path(sys.argv[0])
    values = {  # those of docs/pretrained.md
        "MODEL_PATH": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "ROLLOUT_GLOBAL_BATCH_SIZE": 8,
        "MAX_LENGTH_SAMPLE": 24,
        "TEMPERATURE": 0.6,
        "LEARNING_RATE": 3e-5,
        "STEPS": 10,
        "DATASET": folder,
        "QUESTION_COLUMN": "problem",
        "SYSTEM_PROMPT": script.with_name("easy_math.json"),  # worked examples
        "REWARD_FN": f"{script}:math_correct",
    }
    settings = [f"{name}={shlex.quote(str(value))}" for name, value in values.items()]
    print(*settings, "python train_grpo.py")


if __name__ == "__main__":
    main()
