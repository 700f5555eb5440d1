"""Writes GSM8K for a cold start by train_sft.py and for GRPO after it; docs/gsm8k.md has the run.

    python recipes/gsm8k.py runs/gsm8k

The column `completion` of train.jsonl and test.jsonl has the solution in the form that the default
rewards ask for, without the calculator's marks << >>. reward_steps looks at the equations of a
completion, such as "3 * 4 = $12".
"""

import argparse
import ast
import contextlib
import json
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

import data
from infra.mistakes import UserMistake, exit_with_mistakes
from recipes.calculator import evaluate

# An expression with an operator and without letters, and its result.
EQUATION = re.compile(r"([\d(][\d .()]{,40}[+*/-][\d .()+*/-]{,80})= ?(-?\d+(?:\.\d+)?)")


def demonstration(solution: str) -> str:
    """The completion that shows a solution of GSM8K, such as "6 + 2 = <<6+2=8>>8\\n#### 8"."""
    steps, _, result = re.sub(r"<<.*?>>", "", solution).rpartition("####")
    return f"<think>{steps.strip()}</think>\n<answer>{result.strip()}</answer>"


def check_equations(text: str) -> tuple[int, list[float]]:
    """The number of equations in a text, and the results of those that are right to 1 %."""
    plain = re.sub(r"(?<=\d) ?x ?(?=\d)", "*", re.sub("[$,]", "", text))
    equations, results = EQUATION.findall(plain), []
    for expression, result in equations:
        with contextlib.suppress(SyntaxError, ValueError, ZeroDivisionError):
            value = evaluate(ast.parse(expression.strip(), mode="eval").body)
            if math.isclose(value, float(result), rel_tol=0.01):
                results.append(float(result))
    return len(equations), results


def reward_steps(completions: list[str], answer: list[str], **columns: list) -> list[float]:
    """Gives the number of results of the solution `answer` that right equations of a completion
    have as well, divided by the number of these results or, if there are more, of the completion's
    equations, so that guessed ones cost reward."""
    rewards = []
    for completion, solution in zip(completions, answer, strict=True):
        wanted = set(check_equations(solution)[1])
        count, results = check_equations(completion)
        rewards.append(len(wanted.intersection(results)) / max(len(wanted), count, 1))
    return rewards


def write_split(folder: Path, dataset: str, split: str, most: int) -> None:
    """Writes the examples of a split with their demonstrations, without the training examples whose
    solutions have more than `most` equations. Raises UserMistake."""
    examples = data.load_examples(dataset, "", split)
    if without := [e["answer"] for e in examples if "####" not in e["answer"]]:
        raise UserMistake(
            f"--dataset {dataset}: an answer of split {split!r} has no result after ####, "
            f"{without[0]!r:.80}; give a dataset with GSM8K's solutions"
        )
    rows = [
        {"question": e["question"], "answer": e["answer"], "completion": demonstration(e["answer"])}
        for e in examples
        if split == "test" or e["answer"].count("<<") <= most
    ]
    file = folder / f"{split}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{file} has {len(rows)} questions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder of the files.")
    parser.add_argument("--dataset", default="openai/gsm8k", help="Folder or hub id of GSM8K.")
    help = "Equations in the solution of a training question, at most."
    parser.add_argument("--most-equations", type=int, default=99, help=help)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        for split in ("train", "test"):
            write_split(args.folder, args.dataset, split, args.most_equations)
    except UserMistake as error:
        exit_with_mistakes(error)


if __name__ == "__main__":
    main()
