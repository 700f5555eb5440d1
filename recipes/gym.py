"""Draws the items of a task of reasoning_gym, and scores answers as the task does.

reasoning_gym is an optional package, so only processes of their own run this file: data.py starts
it as a script, which prints the items, and a reward worker calls `score_answer`.
"""

import difflib
import functools
import json
import pickle
import random
import signal
import sys

import numpy as np
import reasoning_gym
import yaml
from reasoning_gym.factory import DATASETS, ProceduralDataset

# Some tasks calculate what an answer says, and 9**9**9 would take ages. The reward worker adds
# these seconds to its time limit.
SECONDS_FOR_EACH_COMPLETION = 1.0


@functools.lru_cache
def open_task(text: str) -> ProceduralDataset:
    """The task of a text such as "chain_sum?min_terms=2&max_terms=3"; the values are YAML. Without
    the arguments of each task, seed and size, it has 2500 items from seed 0 on.

    Raises SystemExit for unknown names, and what the task raises for its arguments.
    """
    name, _, arguments = text.partition("?")
    if name not in DATASETS:
        near = ", ".join(difflib.get_close_matches(name, DATASETS, cutoff=0))
        raise SystemExit(f"reasoning_gym has no task {name!r}; the nearest names are {near}")
    known, values = vars(DATASETS[name][1]()), {"seed": 0, "size": 2500}
    for key, _, written in (each.partition("=") for each in arguments.split("&") if each):
        if key not in known:
            raise SystemExit(f"{name} has no argument {key!r}; it has {', '.join(known)}")
        values[key], kind = yaml.safe_load(written), type(known[key])
        if kind not in (type(values[key]), type(None)):
            if kind in (bool, int):
                raise SystemExit(f"{key}={written} is not of the type {kind.__name__}")
            values[key] = kind(values[key])  # such as a tuple of a list
    return reasoning_gym.create_dataset(name, **values)


def draw(text: str) -> list[dict[str, str]]:
    """The items of a task as examples, with the columns that `score_answer` needs.

    Some items have no answer to show, or an empty one; what `score_answer` needs is in the entry.
    Raises SystemExit with a line of text if the task fails.
    """
    random.seed(0)  # A few tasks draw with global generators.
    np.random.seed(0)
    try:
        entries = list(open_task(text))
    except Exception as error:  # A task may raise anything.
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
    return [
        {
            "question": entry["question"],
            "answer": str(entry["answer"] or "").strip() or "(the task shows no answer)",
            "task": text,
            "entry": pickle.dumps(entry).hex(),
        }
        for entry in entries
    ]


def score_answer(
    completions: list[str], task: list | None = None, entry: list | None = None, **columns: list
) -> list[float | None]:
    """Gives the score of the task to what stands in the last closed <answer>, and 0 without one.

    task, entry: columns that `draw` makes. A question of --ask has none, and gets None.
    """
    if entry is None:
        return [None] * len(completions)
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # raises KeyboardInterrupt
    return [_score(*each) for each in zip(completions, task, entry, strict=True)]


def _score(completion: str, task: str, entry: str) -> float:
    start = completion.rfind("<answer>", 0, max(completion.rfind("</answer>"), 0))
    if start == -1:
        return 0.0
    answer = completion[start + len("<answer>") :].partition("</answer>")[0].strip()
    score, item = open_task(task).score_answer, pickle.loads(bytes.fromhex(entry))
    signal.setitimer(signal.ITIMER_REAL, SECONDS_FOR_EACH_COMPLETION, 1.0)
    try:
        return float(score(answer, item))
    except BaseException:  # It took too long, or the task fails on such a text.
        return 0.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    sys.stdout = sys.stderr  # Some tasks print.
    print(json.dumps(draw(sys.argv[1])), file=sys.__stdout__)
