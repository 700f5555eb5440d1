"""Claims about recipes/arithmetic.py: its questions are disjoint and right, as are rewards."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

from runs import REPO

from recipes.arithmetic import example, reward_steps, splits
from rewards import extract_answer

SUM = r"(\d+) \+ (\d+) \+ (\d+)"


def test_no_sum_of_test_is_in_train_in_any_order_and_every_step_and_answer_is_right() -> None:
    sums = {"train": [], "test": []}
    for name, examples in splits().items():
        for each in examples:
            a, b, c = map(int, re.fullmatch(SUM, each["question"]).groups())
            steps = re.findall(r"<<(\d+)\+(\d+)=(\d+)>>\3\n", each["answer"])
            assert [tuple(map(int, x)) for x in steps] == [(a, b, a + b), (a + b, c, a + b + c)]
            assert extract_answer(each["answer"]) == a + b + c
            x = a + b
            assert each["completion"] == f"{a} + {b} = {x}\n{x} + {c} = {x + c}"
            sums[name].append((a, b, c))
    assert (len(sums["train"]), len(sums["test"])) == (4721, 301)
    assert len({*sums["train"], *sums["test"]}) == 62 * 9 * 9
    assert not {tuple(sorted(x)) for x in sums["train"]} & {tuple(sorted(x)) for x in sums["test"]}


def test_the_files_are_always_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "recipes/arithmetic.py", str(tmp_path)]
    subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.PIPE)
    digests = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in tmp_path.iterdir()
    }
    assert digests == {"train.jsonl": "93e01a8e740bdad8", "test.jsonl": "78362f7c1ded3cc8"}


def test_reward_steps_is_the_fraction_of_right_equations_and_counts_lines_too_many() -> None:
    right = example(17, 5, 8)["answer"]
    cases = {
        "17 + 5 = 22\n22 + 8 = 30\n": 1.0,
        "17 + 5 = 22\n22 + 8 = 30\n30 +": 2 / 3,
        "17+5=22": 0.5,
        "17 + 5 = 21, 22 + 8 = 30": 0.5,
        "117 + 5 = 22": 0.0,
        "17 + 5 = 220, 222 + 8 = 30": 0.0,
        "": 0.0,
    }
    assert reward_steps([*cases], [right] * len(cases)) == [*cases.values()]
