"""Writes sums such as "57 + 5 + 8" as train.jsonl and test.jsonl, and rewards their steps.

    python recipes/arithmetic.py runs/arithmetic

The first number is from 20 to 81, the others are from 1 to 9. The answers have the form of GSM8K: a
line for each step, with the equation inside << >>, and the result after ####. Sums of the same
numbers in another order are in the same split, so that no held-out question is known from the
training in another order. The column `completion` has the two equations, for train_sft.py. The
files are always the same.
"""

import argparse
import itertools
import json
import random
import re
from pathlib import Path

TEST = 300  # the least number of held-out questions
SEED = 0


def example(a: int, b: int, c: int) -> dict[str, str]:
    """The sum of the three numbers as a question with its answer and a demonstration."""
    x, y = a + b, a + b + c
    steps = [f"{a} + {b} = <<{a}+{b}={x}>>{x}", f"{x} + {c} = <<{x}+{c}={y}>>{y}"]
    return {
        "question": f"{a} + {b} + {c}",
        "answer": "\n".join([*steps, f"#### {y}"]),
        "completion": f"{a} + {b} = {x}\n{x} + {c} = {y}",
    }


def splits() -> dict[str, list[dict[str, str]]]:
    """The examples of both splits."""
    same_numbers: dict[tuple[int, ...], list[dict[str, str]]] = {}
    for numbers in itertools.product(range(20, 82), range(1, 10), range(1, 10)):
        same_numbers.setdefault(tuple(sorted(numbers)), []).append(example(*numbers))
    rng = random.Random(SEED)
    groups = rng.sample([*same_numbers.values()], len(same_numbers))
    train: list[dict[str, str]] = []
    test: list[dict[str, str]] = []
    for group in groups:
        (test if len(test) < TEST else train).extend(group)
    return {"train": rng.sample(train, len(train)), "test": rng.sample(test, len(test))}


def reward_steps(completions: list[str], answer: list[str], **columns: list) -> list[float]:
    """Gives the number of the answer's equations in a completion, divided by the number of lines of
    the completion or of the answer, whichever is larger.

    So a superfluous line costs a part of the reward, even if MAX_LENGTH_SAMPLE cuts it off.
    """
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        written = completion.strip().replace(" ", "")
        steps = [re.escape(step) for step in re.findall("<<(.*?)>>", right)]
        right_steps = sum(bool(re.search(rf"(?<!\d){step}(?!\d)", written)) for step in steps)
        rewards.append(right_steps / max(len(steps), len(written.split("\n"))))
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder of the two files.")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, examples in splits().items():
        file = folder / f"{name}.jsonl"
        lines = [json.dumps(entry) + "\n" for entry in examples]
        file.write_text("".join(lines), encoding="utf-8")
        print(f"{file} has {len(examples)} questions")


if __name__ == "__main__":
    main()
