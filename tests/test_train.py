"""Runs as a user starts them: one or two processes, one or eight devices, any batch sizes."""

import atexit
import functools
import itertools
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import forked
import pytest

REPO = Path(__file__).resolve().parent.parent
# A reward function of weight 0 that writes every completion and its answer to a file.
RECORDER = """
import json
import os
def record(completions, answer, **columns):
    with open(os.environ["RECORD_TO"], "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(pair) + "\\n" for pair in zip(answer, completions)))
    return [0.0] * len(completions)
"""


@functools.cache
def few_examples() -> Path:
    """A folder with a part of the tiny dataset, because a run makes the prompts of all examples."""
    folder = Path(tempfile.mkdtemp(prefix="few_"))
    atexit.register(shutil.rmtree, folder)
    for split, count in (("train", 300), ("test", 500)):
        lines = (REPO / "tiny" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:count]), encoding="utf-8")
    return folder


class Result(NamedTuple):
    code: int
    lines: str  # stdout
    errors: str  # stderr
    records: list[dict]  # metrics.jsonl
    completions: list  # (answer, text) of each sequence, in their order


def start(out: Path, env: dict[str, str], devices: int, repo: Path = REPO) -> forked.Process:
    """Starts train_grpo.py for one step on few examples without evaluation, unless `env` says
    otherwise. With SWITCHED_OFF it starts switched_off.py."""
    out.mkdir(parents=True, exist_ok=True)
    recorder = out.parent / "recorder.py"
    recorder.write_text(RECORDER)
    keep = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    recorded = {
        "REWARD_FN": f"reward_correct,reward_format,tag_count_reward,{recorder}:record",
        "REWARD_WEIGHTS": "1,0.5,0.5,0",
    }
    settings = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {forked.FLAGS}",
        "JAX_COMPILATION_CACHE_DIR": str(out.parent / "cache"),
        "RECORD_TO": str(out / "completions.jsonl"),
        "OUTPUT_DIR": str(out),
        "DATASET": str(few_examples()),
        "STEPS": "1",
        "EVAL_EVERY_STEPS": "0",
        "MAX_LENGTH_SAMPLE": "32",
    }
    env = keep | forked.FASTER_TO_COMPILE | settings | recorded | env
    script = "tests/switched_off.py" if "SWITCHED_OFF" in env else "train_grpo.py"
    return forked.start(repo / script, cwd=repo, env=env)


def finish(process: forked.Process, out: Path) -> Result:
    """Waits for the end of a process that `start` has started with the folder `out`."""
    lines, errors = process.communicate(timeout=600)

    def read(name: str) -> list:
        file = out / name
        return [json.loads(line) for line in file.open()] if file.exists() else []

    records, completions = read("metrics.jsonl"), read("completions.jsonl")
    return Result(process.returncode, lines, errors, records, completions)


def train(out: Path, devices: int = 1, **env: str) -> Result:
    result = finish(start(out, env, devices), out)
    assert result.code == 0, result.errors
    return result


def start_two(
    outs: list[Path],
    devices: int,
    *each: dict[str, str],
    repos: tuple[Path, Path] = (REPO, REPO),
    **env: str,
) -> list[forked.Process]:
    """Starts two processes of one run on this machine.

    each: more settings for each process. repos: the folder of the code of each process.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    both["OUTPUT_DIR"] = str(outs[0])
    each = [{"JAX_PROCESS_ID": str(i)} | more for i, more in enumerate(each or ({}, {}))]
    return [
        start(out, env | both | more, devices, repo)
        for out, more, repo in zip(outs, each, repos, strict=True)
    ]


def copy_repository(to: Path) -> Path:
    """Copies the code, the recipes and the tiny model; returns the folder of the copy."""
    to.mkdir()
    for file in REPO.glob("*.py"):
        shutil.copy(file, to)
    for folder in ("models", "runtime", "tools", "recipes", "tiny"):
        shutil.copytree(REPO / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def train_two(out: Path, devices: int, **env: str) -> list[Result]:
    outs = [out / str(i) for i in range(2)]
    running = start_two(outs, devices, **env)
    results = [finish(process, o) for process, o in zip(running, outs, strict=True)]
    for result in results:
        assert result.code == 0, result.errors
    return results


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


def test_the_micro_batch_size_does_not_change_the_step(folder: Path, reference, how) -> None:
    assert_same_step(reference, train(folder / "small", **how, TRAIN_MICRO_BATCH_SIZE="4"))


def test_two_passes_sample_the_same_as_one_pass(folder: Path, reference, how) -> None:
    settings = how | {"BATCH_SIZE": "2", "ROLLOUT_GLOBAL_BATCH_SIZE": "4"}
    two = train(folder / "two", **settings)
    assert "rollout.passes_per_step=2" in two.lines
    assert_same_step(reference, two)


SLOW_MESHES = [pytest.param(OPTIMIZED, x, marks=pytest.mark.slow) for x in ("1,4,2", "1,8,1")]


@pytest.mark.parametrize("how, mesh", [(PLAIN, "1,4,2"), *SLOW_MESHES], indirect=["how"])
def test_eight_devices_do_the_same_step_as_one_device(folder, reference, how, mesh) -> None:
    settings = how | {"MESH_SHAPE": mesh, "TRAIN_MICRO_BATCH_SIZE": "8"}
    eight = train(folder / f"mesh{mesh[2:5:2]}", 8, **settings)
    assert "device_count=8" in eight.lines
    assert_same_step(reference, eight)


@pytest.mark.parametrize("how", [ONLY_SLOW], ids=["optimized"], indirect=True)
def test_decoding_with_tensor_parallelism_samples_the_same(folder: Path, reference, how) -> None:
    mesh = {"ROLLOUT_MESH_SHAPE": "2,1,4", "MESH_SHAPE": "2,2,2", "BATCH_SIZE": "2"}
    settings = how | mesh | {"ROLLOUT_GLOBAL_BATCH_SIZE": "4"}
    assert_same_step(reference, train(folder / "tp", 8, **settings))


# The two worked examples of two processes with four devices each.
SMOKE_4A = {"BATCH_SIZE": "2", "NUM_PRE_Q": "8", "TRAIN_MICRO_BATCH_SIZE": "4"}
SMOKE_4B = {
    "ROLLOUT_GLOBAL_BATCH_SIZE": "16",
    "ROLLOUT_PER_DEVICE_BATCH_SIZE": "1",
    "NUM_PRE_Q": "2",
    "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE": "1",
}


SIZES_4A = (
    "local_batch=16 global_batch=32 rollout.prompt_batch_size=2 rollout.passes_per_step=1 "
    "train.micro_batch_size=4 train.grad_accum_steps=4 train.updates_per_step=1"
)
SIZES_4B = (
    "local_batch=16 global_batch=32 rollout.prompt_batch_size=4 rollout.passes_per_step=2 "
    "train.micro_batch_size=4 train.grad_accum_steps=4 train.updates_per_step=1"
)


@pytest.mark.parametrize(
    "env, alone, sizes",
    [
        (SMOKE_4A, {"BATCH_SIZE": "4", "TRAIN_MICRO_BATCH_SIZE": "8"}, SIZES_4A),
        pytest.param(SMOKE_4B | OPTIMIZED, {}, SIZES_4B, marks=pytest.mark.slow),
    ],
    ids=["4a", "4b"],
)
def test_two_processes_do_the_same_step_as_one_process(
    out: Path, env: dict[str, str], alone: dict[str, str], sizes: str
) -> None:
    name = "4a" if env is SMOKE_4A else "4b"
    one = train(out / f"one{name}", 8, **(env | alone))
    two = train_two(out / f"two{name}", 4, **env)
    for i, result in enumerate(two):
        assert f"process={i}/2 device_count=8 local_device_count=4" in result.lines
        assert sizes in result.lines
        assert re.search(r"^step=0 loss=", result.lines, re.M)
        assert re.search(r"^DONE: steps=1 elapsed_sec=", result.lines, re.M)
    first, second = (result.completions for result in two)
    assert len(first) == len(second) == 16
    assert not {text for _, text in first} & {text for _, text in second}
    assert not two[1].records, "only process 0 writes files"
    assert_same_step(one, two[0]._replace(completions=first + second))


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


@pytest.mark.parametrize("devices, samples", [(1, "8"), (8, "5")])
def test_a_question_may_have_more_samples_than_an_evaluation_pass_has_sequences(
    out: Path, devices: int, samples: str
) -> None:
    settings = {"STEPS": "0", "EVAL_EVERY_STEPS": "1", "EVAL_PROMPTS": "3", "EVAL_SAMPLES": samples}
    result = train(out / f"samples{samples}", devices, BATCH_SIZE="2", NUM_PRE_Q="4", **settings)
    assert re.search(rf"^eval step=0 .*questions=3 .* pass_at_{samples}=", result.lines, re.M)


def test_a_think_tag_that_the_chat_template_opens_belongs_to_the_completion(out: Path) -> None:
    """The tiny model writes its reasoning after the open tag, as in its training data."""
    tiny = json.loads((REPO / "tiny" / "tokenizer_config.json").read_text())["chat_template"]
    result = {}
    for name, tag in (("open", "<think>"), ("lines", "<think>\n")):
        template = out / f"{name}.jinja"
        template.write_text(tiny + f"{{{{ {tag!r} }}}}")
        env = {"CHAT_TEMPLATE": str(template), "STEPS": "0", "EVAL_EVERY_STEPS": "1"}
        result[name] = train(out / f"think_{name}", EVAL_PROMPTS="64", **env)
    texts = [text for _, text in result["open"].completions[:64]]
    assert all(text.startswith("<think>") for text in texts), (
        "the user's reward function sees the tag"
    )
    assert not any(text.startswith("<think><think>") for text in texts)
    rewarded = result["open"].records[0]
    assert rewarded["eval/reward/func/reward_format/mean"] > 0.8
    assert rewarded["eval/reward/func/tag_count_reward/mean"] > 0.9
    texts = [text for _, text in result["lines"].completions[:64]]
    assert all(text.startswith("<think>\n") for text in texts)


def test_config_yaml_has_the_settings_and_what_the_machine_has_made_of_them(out: Path) -> None:
    asked = train(out / "asked", STEPS="0")
    assert "\ndisk: " not in asked.lines  # it writes neither a checkpoint nor an export
    saved = (out / "asked" / "config.yaml").read_text().splitlines()
    asked = [line.partition("#")[0].strip() for line in saved]
    assert "train.attention_impl: auto" in asked and "model.dtype: auto" in asked
    assert "derived.reward_weights: 1.0,0.5,0.5,0.0" in asked
    assert "derived.attention_impl: xla" in asked and "derived.dtype: float32" in asked


def test_a_reward_that_raises_stops_the_run_in_one_line(out: Path) -> None:
    file = out / "raises.py"
    file.write_text("def wrong(completions, **columns):\n    return [1.0 / 0]\n")
    env = {"REWARD_FN": f"{file}:wrong", "REWARD_WEIGHTS": "1"}
    result = finish(start(out / "raises", env, 1), out / "raises")
    assert result.code == 2
    last = result.errors.strip().splitlines()[-1]
    assert last.startswith("error: REWARD_FN") and "ZeroDivisionError" in last and ":2)" in last
    assert "Traceback" not in result.errors


def test_a_bug_in_the_code_keeps_its_traceback_and_is_no_mistake_of_the_user(out: Path) -> None:
    """numpy, jax and zip raise ValueErrors, too."""
    repo = copy_repository(out / "buggy")
    text = (repo / "models" / "hf.py").read_text()
    bug = "    table = np.zeros(512).reshape(3, -1)\n    files, shardings ="
    (repo / "models" / "hf.py").write_text(text.replace("    files, shardings =", bug, 1))
    result = finish(start(out / "bug", {}, 1, repo), out / "bug")
    assert result.code == 1
    assert "Traceback" in result.errors and 'hf.py", line' in result.errors
    last = result.errors.strip().splitlines()[-1]
    assert last == "ValueError: cannot reshape array of size 512 into shape (3,newaxis)"
