"""Writes questions of a task of reasoning_gym, and scores answers as the task does.

    pip install reasoning-gym
    python recipes/gym.py gcd runs/gcd max_numbers=2 max_value=100

This writes train.jsonl, test.jsonl and prompt.txt into the folder runs/gcd, and prints the command
that trains on them. The last tenth of the questions is held out. A question that the task repeats
is written once, so that no held-out question is trained on. The same command writes the same bytes.

Each line holds the item of the task as a literal of Python, which a score reads without executing
it. Some tasks, such as countdown, execute the answer of the model as Python: use a container.
"""

import os
import sys

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":
    # Some tasks draw from sets of texts, whose order would differ between processes. Only a new
    # process can change that; the packages below take seconds to import, so it comes first.
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import argparse
import ast
import difflib
import functools
import json
import random
import shlex
import signal
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import yaml

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS, ProceduralDataset
except ModuleNotFoundError as error:
    raise SystemExit(f"recipes/gym.py: {error}; pip install reasoning-gym") from None

HELD_OUT = 0.1  # fraction of the questions
LIMIT_S = 1.0  # Some tasks calculate what an answer says, and 9**9**9 would take ages.
# The prompt of rewards.py asks for a number, and the answer to a task may be any text.
SYSTEM_PROMPT = """\
Reason step by step inside <think> </think>. Then, on the next line, write only the final answer \
inside <answer> </answer>. Use exactly this form:
<think>your reasoning</think>
<answer>your answer</answer>"""


@functools.lru_cache
def open_task(task: str, *arguments: str) -> ProceduralDataset:
    """The task with arguments such as "max_terms=3", whose values are YAML. Beside the arguments of
    each task, seed and size, it has 2500 items from seed 0 on.

    Raises SystemExit for unknown names, and what the task raises for its arguments.
    """
    if task not in DATASETS:
        near = ", ".join(difflib.get_close_matches(task, DATASETS, cutoff=0))
        raise SystemExit(f"reasoning_gym has no task {task!r}; the nearest names are {near}")
    defaults, values = vars(DATASETS[task][1]()), {"seed": 0, "size": 2500}
    for name, _, text in (argument.partition("=") for argument in arguments):
        if name not in defaults:
            raise SystemExit(f"{task} has no argument {name!r}; it has {', '.join(defaults)}")
        values[name], kind = yaml.safe_load(text), type(defaults[name])
        if kind not in (type(values[name]), type(None)):
            if kind in (bool, int):
                raise SystemExit(f"{name}={text} is not of the type {kind.__name__}")
            values[name] = kind(values[name])  # such as a tuple of a list
    return reasoning_gym.create_dataset(task, **values)


def draw(task: str, arguments: list[str]) -> list[dict]:
    """The distinct questions of a task as examples, with the columns that score_answer needs.

    Some items have no answer to show, or an empty one; what score_answer needs is in the entry.
    Raises SystemExit with a line of text if the task fails.
    """
    random.seed(0)  # A few tasks draw with global generators.
    np.random.seed(0)
    examples = {}
    try:
        for item in open_task(task, *arguments):
            entry = repr(as_python(item))
            ast.literal_eval(entry)  # raises ValueError for what score_answer could not read
            example = {
                "question": item["question"],
                "answer": str(item["answer"] or "").strip() or "(the task shows no answer)",
                "task": task,
                "arguments": arguments,
                "entry": entry,
            }
            examples.setdefault(item["question"], example)
    except Exception as error:  # A task may raise anything.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SystemExit(f"{task}: {reason}") from None
    return [*examples.values()]


def as_python(value: object) -> object:
    """The value with Python's numbers and texts for those of NumPy, and with texts for fractions,
    which stand only in metadata that no score reads."""
    if isinstance(value, dict):
        return {as_python(name): as_python(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(as_python, value))
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Fraction) else value


def score_answer(
    completions: list[str],
    task: Sequence[str] = (),
    arguments: Sequence[list[str]] = (),
    entry: Sequence[str] = (),
    **columns: list,
) -> list[float | None]:
    """Gives the score of the task to what stands in the last closed <answer>, and 0 without one.

    task, arguments, entry: columns that `draw` makes. A question of --ask has none, and gets None.
    """
    if not entry:
        return [None] * len(completions)
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # raises KeyboardInterrupt
    return [
        score_completion(text, open_task(name, *words), ast.literal_eval(item))
        for text, name, words, item in zip(completions, task, arguments, entry, strict=True)
    ]


def score_completion(completion: str, task: ProceduralDataset, item: dict) -> float:
    _, opened, text = completion.rpartition("</answer>")[0].rpartition("<answer>")
    if not opened:
        return 0.0
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S)
    try:
        return float(task.score_answer(text.partition("</answer>")[0].strip(), item))
    except BaseException:  # It took too long, or the task fails on such a text.
        return 0.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", help="Its name in reasoning_gym.")
    parser.add_argument("folder", type=Path, help="Folder of the files.")
    parser.add_argument("arguments", nargs="*", metavar="NAME=VALUE", help="Of the task, as YAML.")
    args = parser.parse_args()
    examples = draw(args.task, args.arguments)
    test_size = max(1, round(HELD_OUT * len(examples)))
    args.folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": examples[:-test_size], "test": examples[-test_size:]}
    for name, split in splits.items():
        file = args.folder / f"{name}.jsonl"
        lines = [json.dumps(example) + "\n" for example in split]
        file.write_text("".join(lines), encoding="utf-8")
        print(f"{file} has {len(split)} questions")
    (args.folder / "prompt.txt").write_text(SYSTEM_PROMPT, encoding="utf-8")
    folder, score = shlex.quote(str(args.folder)), shlex.quote(f"{sys.argv[0]}:score_answer")
    settings = f"DATASET={folder} SYSTEM_PROMPT={folder}/prompt.txt REWARD_FN={score}"
    print(f"{settings} REWARD_TIMEOUT_S=600 python train_grpo.py")  # LIMIT_S for each answer


if __name__ == "__main__":
    main()
