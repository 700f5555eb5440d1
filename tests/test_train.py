"""Runs as a user starts them: one or two processes, one or eight devices, any batch sizes."""

import json
import math
import re
from pathlib import Path

import pytest
from runs import REPO, Result, train, train_two

# ---- Equal steps ---------------------------------------------------------------------------------


def assert_same_step(a: Result, b: Result) -> None:
    """The tokens are equal; the loss, the gradient norm and the entropy are equal to 1e-5."""
    assert sorted(a.completions) == sorted(b.completions)
    for name in ("loss", "grad_norm", "entropy", "total_valid_token_count"):
        pair = [r.records[0][f"train-other/{name}"] for r in (a, b)]
        assert math.isclose(*pair, rel_tol=1e-5, abs_tol=1e-5), (name, pair)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def reference(out: Path) -> Result:
    return train(out / "reference", BATCH_SIZE="4", TRAIN_MICRO_BATCH_SIZE="32")


def test_eight_devices_do_the_same_step_in_more_passes_and_micro_batches(
    out: Path, reference
) -> None:
    """They also decode with tensor parallelism."""
    settings = {"BATCH_SIZE": "2", "ROLLOUT_GLOBAL_BATCH_SIZE": "4", "TRAIN_MICRO_BATCH_SIZE": "8"}
    settings |= {"MESH_SHAPE": "1,4,2", "ROLLOUT_MESH_SHAPE": "2,1,4"}
    eight = train(out / "mesh", 8, **settings)
    assert "device_count=8" in eight.lines
    assert "rollout.passes_per_step=2 train.micro_batch_size=8" in eight.lines
    assert_same_step(reference, eight)


# Attention of all rows in blocks, with the schedule of a GPU. Each process prints its rounds.
IN_ROUNDS = """
import update
from model import blocks, network
blocks.IN_ROUNDS, blocks.BLOCK["cpu"], network.SHORT_TOKENS = {"cpu"}, 16, 0
with_key_blocks = update.with_key_blocks
def told(*arguments):
    listed = with_key_blocks(*arguments)
    print("rounds:", *[x.key_blocks.shape[2] for x in listed])
    return listed
update.with_key_blocks = told
"""


def test_two_processes_do_the_same_step_as_one_process(reference, tmp_path: Path) -> None:
    """This is the published example 4a, with four devices each, and with the attention of a GPU.
    The slow runs of test_teacher.py and test_sft.py have that of a CPU."""
    settings = {"BATCH_SIZE": "2", "NUM_PRE_Q": "8", "TRAIN_MICRO_BATCH_SIZE": "4"}
    two = train_two(tmp_path, 4, IN_ROUNDS, **settings)
    rounds = [re.findall("^rounds: .*", result.lines, re.M) for result in two]
    assert rounds[0] == rounds[1] != []
    for i, result in enumerate(two):
        assert f"process={i}/2 device_count=8 local_device_count=4" in result.lines
        assert "\nlocal_batch=16 global_batch=32 rollout.prompt_batch_size=2 " in result.lines
        assert re.search(r"^step=0 loss=", result.lines, re.M)
        assert re.search(r"^DONE: steps=1 elapsed_sec=", result.lines, re.M)
    first, second = (result.completions for result in two)
    assert len(first) == len(second) == 16
    assert not {text for _, text in first} & {text for _, text in second}
    assert not two[1].records, "only process 0 writes files"
    assert_same_step(reference, two[0]._replace(completions=first + second))


# ---- Evaluations, config.yaml and errors ---------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(out: Path) -> Result:
    """An evaluation of 5 samples of each question, in passes of 4 sequences, with a chat template
    that opens a tag."""
    tiny = json.loads((REPO / "tiny" / "tokenizer_config.json").read_text())["chat_template"]
    (out / "open.jinja").write_text(tiny + "{{ '<think>' }}")
    settings = {"STEPS": "0", "EVAL_EVERY_STEPS": "1", "EVAL_PROMPTS": "12", "EVAL_SAMPLES": "5"}
    settings |= {"BATCH_SIZE": "2", "NUM_PRE_Q": "2", "CHAT_TEMPLATE": f"{out}/open.jinja"}
    return train(out / "evaluated", **settings)


def test_a_question_may_have_more_samples_than_an_evaluation_pass_has_sequences(evaluated) -> None:
    assert re.search(r"^eval step=0 .*questions=12 .* pass_at_5=", evaluated.lines, re.M)


def test_a_think_tag_that_the_chat_template_opens_belongs_to_the_completion(evaluated) -> None:
    """The tiny model writes its reasoning after the open tag, as in its training data."""
    for _, text in evaluated.completions[:60]:
        assert text.startswith("<think>"), "the user's reward function sees the tag"
        assert not text.startswith("<think><think>")
    rewarded = evaluated.records[0]
    assert rewarded["eval/reward/func/reward_format/mean"] > 0.8
    assert rewarded["eval/reward/func/tag_count_reward/mean"] > 0.9


def test_config_yaml_has_the_settings_and_what_the_machine_has_made_of_them(reference) -> None:
    saved = (reference.out / "config.yaml").read_text().splitlines()
    asked = [line.partition("#")[0].strip() for line in saved]
    assert "train.attention_impl: auto" in asked and "model.dtype: auto" in asked
    assert "derived.reward_weights: 1.0,0.5,0.5,0.0" in asked
    assert "derived.attention_impl: xla" in asked and "derived.dtype: float32" in asked
