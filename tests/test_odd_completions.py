"""Odd completions neither end a run nor slow it down."""

import random
import time

import pytest

from rewards import BUILT_IN, penalties

PIECES = """
    <think> </think> <answer> </answer> <Think> <answer <<>> \n \r\n \t #### #### - -- + . .. , , %
    $ 1 0 42 -7 1,234 1,23,4 .5 5. 1e9 1e999 1e-999 nan inf ∞ ½ ٣ ４２ \\frac{1}{2} \\boxed{ } { } (
    ) * / = 0x1F 1_000 999999999999999999999999999999 é 𝟙 \x00 \ud800 \u202e \u2028 ​ 🙂 the a
""".split(" ")
ANSWERS = [
    "#### 42",
    "#### -1,234.5",
    "#### nan",
    "",
    "####",
    "no number",
    "#### 1/0",
    "#### " + "9" * 400,
]
REWARDS = BUILT_IN | penalties(max_length=64, overlong_cache=8)


def test_no_reward_function_raises_on_a_hundred_thousand_odd_completions() -> None:
    rng = random.Random(0)
    for _ in range(100):
        completions = ["".join(rng.choices(PIECES, k=rng.randrange(30))) for _ in range(1000)]
        answers = [rng.choice(ANSWERS) for _ in completions]
        ids = [[rng.randrange(5) for _ in range(rng.randrange(20))] for _ in completions]
        for name, reward in REWARDS.items():
            rewards = reward(completions, answer=answers, completion_ids=ids)
            assert len(rewards) == 1000
            assert all(value is None or -1 <= value <= 1 for value in rewards), name


# Each text has about 100 kB of what makes regular expressions slow.
HUGE = [
    "<think>" * 14_000,
    "<answer>" * 12_000,
    "<think>\n" + "a" * 100_000,
    "1" * 100_000,
    "1," * 50_000,
    "-" * 100_000,
    "1.1" * 33_000,
    " " * 100_000,
    "\n" * 100_000,
    "<" * 100_000,
    "<answer>" + "1 " * 50_000 + "</answer>",
    "<answer>" + "," * 100_000,
    "#### " * 20_000,
    "<think></think>\n" * 6_000 + "<answer>42</answer>",
    "\\frac{" * 16_000,
    "$" * 100_000,
]


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_of_a_hundred_kilobytes_takes_less_than_twenty_milliseconds(name: str) -> None:
    ids = [list(range(1000)) * 25]  # As many tokens as such a text may have.
    for text in HUGE:
        seconds = []
        for _ in range(5):
            start = time.process_time()
            REWARDS[name]([text], answer=["#### 42"], completion_ids=ids)
            seconds.append(time.process_time() - start)
        assert min(seconds) < 0.02, text[:20]
