"""Runs as a user starts them: one or two processes, one or eight devices, any batch sizes."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import REPO, Result, copy_repository, finish, start, train, train_two

# ---- Other folders -------------------------------------------------------------------------------


def run_from(folder: Path, script: Path, *flags: str, **env: str) -> str:
    """The output of a script of the repository that is started by its path, from a folder."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [sys.executable, str(script), *flags]
    env = keep | {"JAX_PLATFORMS": "cpu"} | env
    done = subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, timeout=99)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_repo_and_dotenv_are_those_beside_the_code_in_a_run_from_another_folder(
    tmp_path: Path,
) -> None:
    repo, elsewhere = copy_repository(tmp_path / "repo"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (repo / ".env").write_text("SEED=3\n")
    (elsewhere / ".env").write_text("SEED=4\n")
    script, dataset = repo / "train_grpo.py", "{repo}/tiny/train.jsonl"
    settings = run_from(elsewhere, script, "--print-config", DATASET=dataset)
    settings = [line.partition("#")[0].strip() for line in settings.splitlines()]
    assert "data.seed: 3" in settings
    assert f"data.dataset: {repo}/tiny/train.jsonl" in settings
    assert f"model.path: {repo}/tiny" in settings


def test_startup_shows_the_devices_from_the_top_folder_and_from_another_folder(
    tmp_path: Path,
) -> None:
    for folder, script in ((REPO, Path("startup.py")), (tmp_path, REPO / "startup.py")):
        lines = run_from(folder, script, STEPS="1").splitlines()
        assert "backend=cpu process=0/1 device_count=1 local_device_count=1" in lines
        assert re.fullmatch(r"versions python=3\S+ jax=\S+ jaxlib=\S+ .*", lines[-1])
    assert not [*tmp_path.iterdir()], "nothing is left behind"


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


# The slow tests compare the programs that a user's step runs, with all optimizations.
PLAIN, OPTIMIZED = ({"JAX_DISABLE_MOST_OPTIMIZATIONS": digit} for digit in "10")
ONLY_SLOW = pytest.param(OPTIMIZED, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[PLAIN, ONLY_SLOW], ids=["plain", "optimized"])
def how(request: pytest.FixtureRequest) -> dict[str, str]:
    """Settings of all steps that are compared with each other."""
    return {"BATCH_SIZE": "4"} | request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, how: dict[str, str]) -> Path:
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def reference(folder: Path, how: dict[str, str]) -> Result:
    return train(folder / "reference", **how, TRAIN_MICRO_BATCH_SIZE="32")


def test_micro_batches_and_passes_do_not_change_the_step(folder: Path, reference, how) -> None:
    settings = how | {"BATCH_SIZE": "2", "ROLLOUT_GLOBAL_BATCH_SIZE": "4"}
    parts = train(folder / "parts", **settings, TRAIN_MICRO_BATCH_SIZE="4")
    assert "rollout.passes_per_step=2 train.micro_batch_size=4" in parts.lines
    assert_same_step(reference, parts)


def test_eight_devices_do_the_same_step_as_one_device(folder: Path, reference, how) -> None:
    settings = how | {"MESH_SHAPE": "1,4,2", "TRAIN_MICRO_BATCH_SIZE": "8"}
    eight = train(folder / "mesh", 8, **settings)
    assert "device_count=8" in eight.lines
    assert_same_step(reference, eight)


@pytest.mark.parametrize("how", [ONLY_SLOW], ids=["optimized"], indirect=True)
def test_decoding_with_tensor_parallelism_samples_the_same(folder: Path, reference, how) -> None:
    mesh = {"ROLLOUT_MESH_SHAPE": "2,1,4", "MESH_SHAPE": "2,2,2", "BATCH_SIZE": "2"}
    settings = how | mesh | {"ROLLOUT_GLOBAL_BATCH_SIZE": "4"}
    assert_same_step(reference, train(folder / "tp", 8, **settings))


def test_two_processes_do_the_same_step_as_one_process(folder: Path, reference, how) -> None:
    """This is the published example 4a, with four devices each."""
    settings = how | {"BATCH_SIZE": "2", "NUM_PRE_Q": "8", "TRAIN_MICRO_BATCH_SIZE": "4"}
    two = train_two(folder / "two", 4, **settings)
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


@pytest.mark.slow
def test_later_epochs_clip_the_reference_stays_and_each_step_samples_other_completions(
    out: Path,
) -> None:
    settings = {"STEPS": "3", "PPO_EPOCHS": "3", "BETA": "0.1", "LEARNING_RATE": "1e-4"}
    result = train(out / "epochs", LR_SCHEDULE="constant", WARMUP_RATIO="0", **settings)
    for record in result.records:
        assert record["train-other/clip_ratio/region_mean"] > 0
        # The sampler is compared with the policy before the first update, in every epoch.
        assert record["train-other/sampling_logp_difference/max"] < 1e-4
    kl = [record["train-other/kl"] for record in result.records]
    assert 0 < kl[0] < kl[1] < kl[2], "the policy moves away from the model with which it began"
    steps = [result.completions[i : i + 128] for i in (0, 128, 256)]
    for a, b in itertools.combinations(steps, 2):
        assert len({text for _, text in a} & {text for _, text in b}) < 5


# ---- Evaluations, config.yaml and errors ---------------------------------------------------------


def test_a_question_may_have_more_samples_than_an_evaluation_pass_has_sequences(out: Path) -> None:
    settings = {"STEPS": "0", "EVAL_EVERY_STEPS": "1", "EVAL_PROMPTS": "3", "EVAL_SAMPLES": "5"}
    result = train(out / "samples", 8, BATCH_SIZE="2", NUM_PRE_Q="4", **settings)
    assert re.search(r"^eval step=0 .*questions=3 .* pass_at_5=", result.lines, re.M)


def test_a_think_tag_that_the_chat_template_opens_belongs_to_the_completion(out: Path) -> None:
    """The tiny model writes its reasoning after the open tag, as in its training data."""
    tiny = json.loads((REPO / "tiny" / "tokenizer_config.json").read_text())["chat_template"]
    template = out / "open.jinja"
    template.write_text(tiny + "{{ '<think>' }}")
    env = {"CHAT_TEMPLATE": str(template), "STEPS": "0", "EVAL_EVERY_STEPS": "1"}
    result = train(out / "think", EVAL_PROMPTS="64", **env)
    for _, text in result.completions[:64]:
        assert text.startswith("<think>"), "the user's reward function sees the tag"
        assert not text.startswith("<think><think>")
    rewarded = result.records[0]
    assert rewarded["eval/reward/func/reward_format/mean"] > 0.8
    assert rewarded["eval/reward/func/tag_count_reward/mean"] > 0.9


def test_config_yaml_has_the_settings_and_what_the_machine_has_made_of_them(reference) -> None:
    saved = (reference.out / "config.yaml").read_text().splitlines()
    asked = [line.partition("#")[0].strip() for line in saved]
    assert "train.attention_impl: auto" in asked and "model.dtype: auto" in asked
    assert "derived.reward_weights: 1.0,0.5,0.5,0.0" in asked
    assert "derived.attention_impl: xla" in asked and "derived.dtype: float32" in asked


def test_a_bug_in_the_code_keeps_its_traceback_and_is_no_mistake_of_the_user(out: Path) -> None:
    """numpy, jax and zip raise ValueErrors, too."""
    repo = copy_repository(out / "buggy")
    text = (repo / "models" / "hf.py").read_text()
    line = "    files = _open_tensors(folder, table)\n"
    assert line in text
    bug = text.replace(line, f"    table = np.zeros(512).reshape(3, -1)\n{line}")
    (repo / "models" / "hf.py").write_text(bug)
    result = finish(start(out / "bug", {}, 1, repo), out / "bug")
    assert result.code == 1
    assert "Traceback" in result.errors and 'hf.py", line' in result.errors
    last = result.errors.strip().splitlines()[-1]
    assert last == "ValueError: cannot reshape array of size 512 into shape (3,newaxis)"
