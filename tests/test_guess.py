"""Claims about the game of recipes/guess.py and about recipes/make_guesser.py: what the game
answers, how its players play, and what supervised training teaches. A run plays the game."""

import json
import random
import re
import sys
from pathlib import Path

import pytest
from runs import REPO, run_as_user_here

from chat import ChatFormat
from demonstrations import build_demonstrations
from model import hf
from recipes import make_guesser
from recipes.guess import Guess
from tiny import make

GAME = {"question": "It is from 11 to 25.", "answer": "17"}


def test_the_game_answers_each_guess_and_rewards_the_right_one() -> None:
    game = Guess()
    game.reset(answer="17")
    said = ["11", "Is it 25?", "I do not know.", "Not 17 but 18", "17"]
    assert [game.reply(text) for text in said[:4]] == ["higher", "lower", "Say a number.", "lower"]
    assert game.get_reward() == 0
    assert game.reply(said[4]) is None and game.get_reward() == 1


def test_no_range_of_the_test_questions_is_in_the_train_questions() -> None:
    test = make_guesser.questions(make_guesser.HELD_OUT)
    train = make_guesser.questions(sorted({*make_guesser.LEAST} - {*make_guesser.HELD_OUT}))
    assert (len(train), len(test)) == (195, 30)
    assert train[6] == GAME and test[0] == {"question": "It is from 31 to 45.", "answer": "31"}
    assert not {each["question"] for each in train} & {each["question"] for each in test}


def right_guesses(mistakes: float) -> tuple[float, float]:
    """The share of later guesses that agree with all earlier answers, and of games that are won."""
    rng = random.Random(0)
    agree, won, games = [], 0, 500
    for _ in range(games):
        said = make_guesser.game(GAME, mistakes, rng)
        assert len(said) in (1, 3, 5, 7)
        guesses, replies = [int(guess) for guess in said[::2]], said[1::2]
        assert replies == ["higher" if guess < 17 else "lower" for guess in guesses[:-1]]
        for turn in range(1, len(guesses)):
            too_low = [guess for guess in guesses[:turn] if guess < 17]
            too_high = [guess for guess in guesses[:turn] if guess > 17]
            agree.append(max(too_low, default=10) < guesses[turn] < min(too_high, default=26))
        won += said[-1] == "17"
    return sum(agree) / len(agree), won / games


def test_the_careful_player_heeds_all_answers_and_the_careless_one_none() -> None:
    agree, won = right_guesses(0.0)
    assert agree == 1 and won > 0.7
    agree, won = right_guesses(1.0)
    # Four numbers of fifteen, each drawn anew.
    assert 0.5 < agree < 0.7 and won == pytest.approx(1 - (14 / 15) ** 4, abs=0.04)


def test_supervised_training_teaches_only_what_the_player_says() -> None:
    tokenizer = hf.load_tokenizer(REPO / "tiny")
    game = make.demonstrate({"question": "It is from 1 to 9."}, ["5", "higher", "7"])
    [learnt] = build_demonstrations([game], ChatFormat(tokenizer, []))
    pairs = zip(learnt.completion_ids, learnt.completion_mask, strict=True)
    taught = tokenizer.decode([token for token, is_taught in pairs if is_taught])
    assert taught == "5<|im_end|>7<|im_end|>"
    assert "user\nhigher<|im_end|>" in tokenizer.decode(learnt.completion_ids)


@pytest.mark.slow
def test_the_recipe_plays_the_game_with_a_model_that_the_tool_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has been taught too little to win: this shows that the parts fit together."""
    [stage] = make_guesser.STAGES
    monkeypatch.setattr(make_guesser, "STAGES", [stage._replace(steps=20, careful_steps=10)])
    monkeypatch.setattr(sys, "argv", ["make_guesser.py", str(tmp_path)])
    make_guesser.main()
    recipes = REPO / "recipes"
    settings = {"MODEL_PATH": str(tmp_path), "DATASET": str(tmp_path), "STEPS": "1"}
    settings |= {"EVAL_EVERY_STEPS": "0", "ENVIRONMENT_CLASS": f"{recipes}/guess.py:Guess"}
    settings["NUM_PRE_Q"] = "4"  # instead of 16, to be quick
    run = run_as_user_here(tmp_path / "run", "--config", f"{recipes}/guess.yaml", **settings)
    assert run.code == 0, run.errors
    turns = [each["train-turns/number"] for each in run.records if "train-turns/number" in each]
    assert turns and all(1 < number <= 4 for number in turns)
    game = re.compile(r"\[policy\] .*\n\[environment\] <\|im_start\|>user\n(higher|lower|Say)")
    sample = json.loads((run.out / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert any(game.match(each["text"]) for each in sample["completions"])
