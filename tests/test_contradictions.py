"""config.py: combinations of settings that stop a run, and those that get a line `note:`."""

import dataclasses

import pytest
from test_config import REAL, env, rows

import config
from config import Config
from runtime.mistakes import AMBIGUOUS, NOT_SETTINGS, UserMistake
from runtime.parsing import names_elsewhere

# ---- Combinations that stop a run ----------------------------------------------------------------

CONTRADICTIONS = """
NUM_PRE_Q=1 -> NUM_PRE_Q=1 leaves ADV_ESTIMATOR=grpo nothing to compare a completion with;
    set at least 2, or ADV_ESTIMATOR=reinforce
NUM_PRE_Q=1 ADV_ESTIMATOR=reinforce++ -> NUM_PRE_Q=1 leaves ADV_ESTIMATOR=reinforce++ nothing to
    compare a completion with; set at least 2, or ADV_ESTIMATOR=reinforce
ADV_ESTIMATOR=reinforce DYNAMIC_SAMPLING=1 -> DYNAMIC_SAMPLING=1 drops groups that
    ADV_ESTIMATOR=reinforce can use; leave it out
LOSS_TYPE=cispo -> EPS_HIGH=0.2 caps every ratio of LOSS_TYPE=cispo below 1; set EPS_HIGH=5
BETA=1 KL_ESTIMATOR=k1 KL_BIAS_CORRECTION=0 -> KL_ESTIMATOR=k1 has no gradient on average with
    KL_BIAS_CORRECTION=0; set it to 1
IS_MODE=sequence_mask TOP_P=0.9 SAMPLING_SUPPORT=full -> IS_MODE=sequence_mask with TOP_K, TOP_P or
    MIN_P shrinks a sequence's weight with every token; set token_truncate or token_mask, or leave
    out SAMPLING_SUPPORT=full
TOP_K=9 POLICY_LOSS_IMPL=pallas -> POLICY_LOSS_IMPL=pallas cannot replay the tokens that TOP_K,
    TOP_P, MIN_P leave; leave POLICY_LOSS_IMPL out, or set SAMPLING_SUPPORT=full (a biased loss)
TOP_K=9 ROLLOUT_BACKEND=sglang_jax STEPS=0 -> ROLLOUT_BACKEND=sglang_jax cannot replay the tokens
    that TOP_K, TOP_P, MIN_P leave; leave ROLLOUT_BACKEND out, or set SAMPLING_SUPPORT=full (a
    biased loss)
TOP_K=129 -> TOP_K=129 is too many tokens to replay; set at most 128, or SAMPLING_SUPPORT=full
DELTA=1.5 EPS_HIGH=0.5 -> DELTA=1.5 must be above 1 + EPS_HIGH = 1.5, where clipping begins
REWARD_FN=soft_overlong_penalty OVERLONG_CACHE=1025 -> OVERLONG_CACHE=1025 must be at most
    MAX_LENGTH_SAMPLE=1024
OUTPUT_DIR=gs://b/run -> OUTPUT_DIR and EXPORT_HF are folders of this machine; CHECKPOINT_DIR may be
    gs://
"""
AGREEMENTS = """
NUM_PRE_Q=2
NUM_PRE_Q=1 ADV_ESTIMATOR=reinforce
NUM_PRE_Q=1 STEPS=0
LOSS_TYPE=cispo EPS_HIGH=1
LOSS_TYPE=sapo
LOSS_TYPE=gspo DELTA=2
DELTA=1.5 EPS_HIGH=0.49
SCALE_REWARDS=none LOSS_TYPE=dr_grpo
SCALE_REWARDS=batch
ADV_ESTIMATOR=rloo SCALE_REWARDS=group
REWARD_FN=soft_overlong_penalty OVERLONG_CACHE=1024
BETA=1 KL_ESTIMATOR=k1
IS_MODE=token_mask IS_FLOOR=0.5 IS_CAP=2 TOP_P=0.9
"""


@pytest.mark.parametrize(("settings", "message"), rows(CONTRADICTIONS))
def test_settings_that_contradict_each_other_are_an_error_that_says_what_would_do(
    settings, message
):
    with pytest.raises(UserMistake) as error:
        Config.from_env(env(f"{REAL} {settings}"))
    assert str(error.value) == message


@pytest.mark.parametrize("settings", AGREEMENTS.strip().splitlines())
def test_similar_settings_without_a_contradiction_pass(settings: str) -> None:
    Config.from_env(env(f"{REAL} {settings}"))


# ---- Lines about combinations that are no mistakes -----------------------------------------------

NOTES = """
DATASET=my.jsonl -> MODEL_PATH is not set, so DATASET=my.jsonl trains this project's tiny model
LR_DECAY_STEPS=100 STEPS=200 -> LR_DECAY_STEPS=100 is less than STEPS=200: later steps have learning
    rate 0
EPS_HIGH=0.3 -> {ratios} EPS_HIGH=0.3 {idle}
DELTA=4 EPS_LOW=0.1 -> {ratios} EPS_LOW=0.1 and DELTA=4.0 {idle}
LOSS_TYPE=gspo EPS_LOW=3e-4 -> {ratios} EPS_LOW=0.0003 and the ratios of LOSS_TYPE=gspo {idle}
LOSS_TYPE=sapo -> {ratios} the ratios of LOSS_TYPE=sapo {idle}
KL_ESTIMATOR=k1 -> KL_ESTIMATOR=k1 does nothing with BETA=0
IS_CAP=2 -> IS_CAP=2.0 does nothing with IS_MODE=none
SAMPLING_SUPPORT=full -> SAMPLING_SUPPORT=full does nothing with TOP_K=0, TOP_P=1.0 and MIN_P=0.0
ADV_ESTIMATOR=rloo SCALE_REWARDS=none -> SCALE_REWARDS=none does nothing with ADV_ESTIMATOR=rloo
DYNAMIC_SAMPLING_MAX_ROUNDS=3 -> DYNAMIC_SAMPLING_MAX_ROUNDS=3 does nothing with DYNAMIC_SAMPLING=0
OVERLONG_CACHE=5 -> OVERLONG_CACHE=5 does nothing with REWARD_FN=
SGLANG_JAX_DTYPE=float32 -> SGLANG_JAX_DTYPE=float32 does nothing with ROLLOUT_BACKEND=naive
LOSS_TYPE=cispo EPS_HIGH=5 DELTA=7 PPO_EPOCHS=2 -> DELTA=7.0 does nothing with LOSS_TYPE=cispo
LOSS_TYPE=sapo EPS_LOW=0.1 PPO_EPOCHS=2 -> EPS_LOW=0.1 does nothing with LOSS_TYPE=sapo
EVAL_PROMPTS=9 EVAL_EVERY_STEPS=0 -> EVAL_PROMPTS=9 does nothing with EVAL_EVERY_STEPS=0
TOP_K=9 SAMPLING_SUPPORT=full -> {sampling}
TOP_P=0.9 MIN_P=0.1 SAMPLING_SUPPORT=full -> {sampling}
WANDB_PROJECT=grpo -> WANDB_PROJECT=grpo does nothing with WANDB_MODE empty and no WANDB_API_KEY
WANDB_PROJECT=grpo WANDB_MODE=disabled -> WANDB_PROJECT=grpo does nothing with WANDB_MODE=disabled
MODEL=org/name -> MODEL=org/name is ignored; the setting is called MODEL_PATH
DATASET_NAME=org/name -> DATASET_NAME=org/name is ignored; the setting is called DATASET
"""
NO_NOTES = """
LR_DECAY_STEPS=100 STEPS=200 LR_SCHEDULE=constant
EPS_HIGH=0.3 PPO_EPOCHS=2
EPS_HIGH=0.3 NUM_MINI_BATCHES=2
TOP_K=9
TOP_K=9 IS_MODE=sequence_mask
TOP_K=9 SAMPLING_SUPPORT=full IS_MODE=token_truncate
TOP_K=9 SAMPLING_SUPPORT=full STEPS=0
LOSS_TYPE=gspo STEPS=0
LOSS_TYPE=grpo
EVAL_EVERY_STEPS=0
WANDB_PROJECT=grpo WANDB_MODE=offline
MODEL=org/name MODEL_PATH=org/other
"""


@pytest.mark.parametrize(("settings", "note"), rows(NOTES))
def test_a_line_says_what_does_nothing_or_may_not_be_meant(settings: str, note: str) -> None:
    ratios = "with one update per step every ratio is 1, and"
    idle = "do nothing; with NUM_MINI_BATCHES=2 or PPO_EPOCHS=2 they count"
    note = note.replace("{ratios}", ratios).replace("{idle}", idle)
    bias = "TOP_K, TOP_P, MIN_P change sampling only, and the loss has a bias"
    corrects = "leave out SAMPLING_SUPPORT=full, or set IS_MODE=token_truncate"
    note = note.replace("{sampling}", f"{bias}; {corrects}")
    assert config.load([], env(settings)).lines[1:] == [f"note: {note}"]


@pytest.mark.parametrize("settings", NO_NOTES.strip().splitlines())
def test_there_is_no_line_about_settings_with_an_effect_nor_about_those_of_the_tiny_recipe(
    settings: str,
) -> None:
    """recipes/tiny.yaml sets EVAL_PROMPTS."""
    assert config.load([], env(settings)).lines[1:] == []


def test_names_that_other_programs_may_set_are_no_settings_and_lead_to_settings() -> None:
    names = {name.upper() for name in Config.__dataclass_fields__}
    assert set(AMBIGUOUS.values()) <= names
    assert not AMBIGUOUS.keys() & {
        *names,
        *names_elsewhere(dataclasses.fields(Config)),
        *NOT_SETTINGS,
    }
