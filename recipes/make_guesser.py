"""Makes the model and the questions of recipes/guess.yaml, a game of several turns.

    python recipes/make_guesser.py runs/guesser    # takes about two minutes on 2 cores

A number has to be found among 15 neighbours with four guesses; each guess but the last is answered
with "higher" or "lower". Supervised training first shows a careful player, who guesses near the
middle of the numbers that are left. Its last steps show a player who is careless in 70 % of the
games, and ignores the answers there. After that the model plays carelessly most of the time, so
that reinforcement learning has to teach it to use the answers.
"""

import argparse
import random
import re
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

from recipes.guess import Guess
from tiny import make

NUMBERS, TURNS = 15, 4
# The least number of each range. Supervised training knows all; test.jsonl has the held-out ones.
LEAST, HELD_OUT = range(11, 86, 5), (31, 61)
SYSTEM_PROMPT = "Guess my number."
STAGES = [make.Stage(800, 64, 1, SYSTEM_PROMPT, 0.7, careful_steps=700, peak_lr=4e-3)]
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}


def questions(ranges: list[int]) -> list[dict[str, str]]:
    """The examples: a question for each number of each range."""
    return [
        {"question": f"It is from {least} to {least + NUMBERS - 1}.", "answer": str(number)}
        for least in ranges
        for number in range(least, least + NUMBERS)
    ]


def game(example: dict[str, str], mistakes: float, rng: random.Random) -> list[str]:
    """What the player and Guess say in turn; the player is careless with probability `mistakes`."""
    careless, guess, said = rng.random() < mistakes, Guess(), []
    least, greatest = numbers = [int(text) for text in re.findall(r"\d+", example["question"])]
    guess.reset(**example)
    while True:
        third = (greatest - least + 1) // 3
        number = rng.randint(*(numbers if careless else (least + third, greatest - third)))
        said.append(str(number))
        answer = guess.reply(said[-1])
        if answer is None or len(said) == 2 * TURNS - 1:
            return said
        said.append(answer)
        least, greatest = (number + 1, greatest) if answer == "higher" else (least, number - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder of the model and the questions.")
    folder = parser.parse_args().folder
    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed
    folder.mkdir(parents=True, exist_ok=True)
    train, test = questions(sorted({*LEAST} - {*HELD_OUT})), questions(HELD_OUT)
    make.write_examples(folder, train, test)
    prompts = [f"system\n{SYSTEM_PROMPT}\nuser\n{each['question']}\nassistant\n" for each in train]
    make.write_tokenizer(folder, prompts + ["higher lower Say a number."] * 50)
    make.write_config(folder, make.MODEL | SIZES)
    make.warm_up(folder, train + test, STAGES, game, T=48)
    print(f"{folder} has a model, {len(train)} questions and {len(test)} held-out ones.")


if __name__ == "__main__":
    main()
