"""Combinations of settings that stop a run, and those that get a line `note:`."""

import pytest

import config
from config import Config
from runtime.mistakes import UserMistake

# ---- Combinations that stop a run ----------------------------------------------------------------

CONTRADICTIONS = """
NUM_PRE_Q=1 -> NUM_PRE_Q=1 leaves ADV_ESTIMATOR=grpo nothing to compare
NUM_PRE_Q=1 ADV_ESTIMATOR=reinforce++ -> NUM_PRE_Q=1 leaves ADV_ESTIMATOR=reinforce++ nothing
ADV_ESTIMATOR=reinforce DYNAMIC_SAMPLING=1 -> DYNAMIC_SAMPLING=1 drops groups
LOSS_TYPE=cispo -> EPS_HIGH=0.2 caps every ratio of LOSS_TYPE=cispo below 1; set EPS_HIGH=5
BETA=1 KL_ESTIMATOR=k1 KL_BIAS_CORRECTION=0 -> KL_ESTIMATOR=k1 has no gradient on average
IS_MODE=sequence_mask TOP_P=0.9 SAMPLING_SUPPORT=full -> IS_MODE=sequence_mask with SAMPLING_SUPP
TOP_K=9 POLICY_LOSS_IMPL=pallas -> POLICY_LOSS_IMPL=pallas cannot replay the tokens that TOP_K,
TOP_K=9 ROLLOUT_BACKEND=sglang_jax STEPS=0 -> ROLLOUT_BACKEND=sglang_jax cannot replay the tokens
TOP_K=129 -> TOP_K=129 is too many tokens to replay; set at most 128, or SAMPLING_SUPPORT=full
DELTA=1.5 EPS_HIGH=0.5 -> DELTA=1.5 must be above 1 + EPS_HIGH = 1.5
OVERLONG_CACHE=1025 -> OVERLONG_CACHE=1025 must be at most MAX_LENGTH_SAMPLE=1024
OUTPUT_DIR=gs://b/run -> OUTPUT_DIR and EXPORT_HF are folders of this machine
"""
AGREEMENTS = """
NUM_PRE_Q=2
NUM_PRE_Q=1 ADV_ESTIMATOR=reinforce
NUM_PRE_Q=1 STEPS=0
LOSS_TYPE=cispo EPS_HIGH=1
LOSS_TYPE=gspo DELTA=2
DELTA=1.5 EPS_HIGH=0.49
SCALE_REWARDS=none LOSS_TYPE=dr_grpo
REWARD_FN=soft_overlong_penalty OVERLONG_CACHE=1024
BETA=1 KL_ESTIMATOR=k1
TOP_K=9 SAMPLING_SUPPORT=full POLICY_LOSS_IMPL=pallas
IS_MODE=token_mask IS_FLOOR=0.5 IS_CAP=2 TOP_P=0.9
"""


def settings(text: str) -> dict[str, str]:
    return dict(setting.split("=", 1) for setting in text.split())


@pytest.mark.parametrize("row", CONTRADICTIONS.strip().splitlines())
def test_settings_that_contradict_each_other_are_one_line_that_names_them(row: str) -> None:
    given, words = row.split(" -> ")
    with pytest.raises(UserMistake) as error:
        Config.from_env(settings(f"MODEL_PATH=m {given}"))
    assert str(error.value).startswith(words) and "\n" not in str(error.value)


@pytest.mark.parametrize("given", AGREEMENTS.strip().splitlines())
def test_similar_settings_without_a_contradiction_pass(given: str) -> None:
    Config.from_env(settings(f"MODEL_PATH=m {given}"))


# ---- Lines about combinations that are no mistakes -----------------------------------------------

NOTES = """
DATASET=my.jsonl -> MODEL_PATH is not set, so DATASET=my.jsonl trains this project's tiny model
MODEL_PATH= DATASET=my.jsonl -> MODEL_PATH is not set, so DATASET=my.jsonl trains this project's
LR_DECAY_STEPS=100 STEPS=200 -> LR_DECAY_STEPS=100 is less than STEPS=200
EPS_HIGH=0.3 -> EPS_HIGH=0.3 does nothing with one update per step
KL_ESTIMATOR=k1 -> KL_ESTIMATOR=k1 does nothing with BETA=0
IS_CAP=2 -> IS_CAP=2.0 does nothing with IS_MODE=none
SAMPLING_SUPPORT=full -> SAMPLING_SUPPORT=full does nothing with TOP_K=0, TOP_P=1.0 and MIN_P=0.0
ADV_ESTIMATOR=rloo SCALE_REWARDS=none -> SCALE_REWARDS=none does nothing with ADV_ESTIMATOR=rloo
OVERLONG_CACHE=5 -> OVERLONG_CACHE=5 does nothing with REWARD_FN=
SGLANG_JAX_DTYPE=float32 -> SGLANG_JAX_DTYPE=float32 does nothing with ROLLOUT_BACKEND=naive
LOSS_TYPE=sapo EPS_HIGH=5 PPO_EPOCHS=2 -> EPS_HIGH=5.0 does nothing with LOSS_TYPE=sapo
LOSS_TYPE=cispo EPS_HIGH=5 DELTA=7 PPO_EPOCHS=2 -> DELTA=7.0 does nothing with LOSS_TYPE=cispo
TOP_K=9 SAMPLING_SUPPORT=full -> TOP_K, TOP_P, MIN_P change sampling only, and the loss has a bias
WANDB_PROJECT=grpo -> WANDB_PROJECT=grpo does nothing with WANDB_MODE empty and no WANDB_API_KEY
MODEL=org/name -> MODEL=org/name is ignored; the setting is called MODEL_PATH
"""
NO_NOTES = """
LR_DECAY_STEPS=100 STEPS=200 LR_SCHEDULE=constant
EPS_HIGH=0.3 PPO_EPOCHS=2
EPS_HIGH=0.3 NUM_MINI_BATCHES=2
TOP_K=9 IS_MODE=sequence_mask
TOP_K=9 SAMPLING_SUPPORT=full IS_MODE=token_truncate
LOSS_TYPE=grpo
EVAL_EVERY_STEPS=0
WANDB_PROJECT=grpo WANDB_MODE=offline
MODEL=org/name MODEL_PATH=org/other
"""


@pytest.mark.parametrize("row", NOTES.strip().splitlines())
def test_a_line_says_what_does_nothing_or_may_not_be_meant(row: str) -> None:
    given, words = row.split(" -> ")
    (line,) = config.load([], settings(given)).lines[1:]
    assert line.startswith(f"note: {words}")


@pytest.mark.parametrize("given", NO_NOTES.strip().splitlines())
def test_there_is_no_line_about_settings_with_an_effect_nor_about_those_of_the_tiny_recipe(
    given: str,
) -> None:
    assert config.load([], settings(given)).lines[1:] == []
