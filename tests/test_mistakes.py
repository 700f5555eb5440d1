"""A mistake of a user ends in one line that names the setting or file, and in exit code 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import forked
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from config import Config
from models import hf
from runtime.mistakes import UserMistake
from startup import set_up
from test_smoke import REPO, Run, environment

# ---- Sizes, devices, rewards, outputs ------------------------------------------------------------

INPUTS = [  # environment, words of the line
    ({"TRAIN_MICRO_BATCH_SIZE": "7"}, "TRAIN_MICRO_BATCH_SIZE=7 must divide local_batch"),
    ({"ROLLOUT_BATCH_SIZE": "100"}, "ROLLOUT_BATCH_SIZE=100 must be a multiple of"),
    ({"GRAD_ACCUM_STEPS": "3"}, "GRAD_ACCUM_STEPS=3 must divide local_batch"),
    ({"REQUIRE_MULTIHOST": "1"}, "REQUIRE_MULTIHOST=1, and this process is alone"),
    ({"REQUIRE_JAX_PROCESS_COUNT": "2"}, "REQUIRE_JAX_PROCESS_COUNT=2, and 1 joined"),
    ({"REWARD_FN": "mine.py:reward"}, "REWARD_FN: there is no file mine.py"),
    ({"REWARD_FN": "reward"}, "REWARD_FN: 'reward' is not file.py:name"),
    ({"REWARD_WEIGHTS": "1,1"}, "REWARD_WEIGHTS=1.0,1.0 has 2 numbers; give 3"),
    ({"POLICY_LOSS_IMPL": "pallas"}, "POLICY_LOSS_IMPL=pallas needs DTYPE=bfloat16 on a TPU"),
    (
        {"MESH_SHAPE": "1,3,1"},
        "MESH_SHAPE=1,3,1 is a mesh of 3 devices, but the run has 8; set MESH_SHAPE=auto",
    ),
    ({"MAX_PROMPT_LENGTH": "5"}, "MAX_PROMPT_LENGTH=5: every train prompt is longer"),
    ({"MAX_LENGTH_SAMPLE": "5000"}, "MAX_LENGTH_SAMPLE=5000 after the longest prompt"),
    ({"SYSTEM_PROMPT": "prompts/mine.txt"}, "SYSTEM_PROMPT=prompts/mine.txt: no such file"),
    ({"EXPORT_HF": str(REPO / "LICENSE")}, "LICENSE cannot be written"),
    ({"EXPORT_HF": str(REPO / "tiny")}, "is MODEL_PATH; the model would be overwritten"),
    ({"ATTENTION_IMPL": "splash"}, "ATTENTION_IMPL=splash: it is a TPU kernel"),
    ({"MODEL_PATH": "no/such/folder"}, "MODEL_PATH=no/such/folder: no such folder"),
]
RUNS = {  # found only by a run: its environment, words of the line
    "another platform": ({"JAX_PLATFORMS": "rocm"}, "JAX_PLATFORMS=rocm: no such device here"),
    "no coordinator": ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}, "needs JAX_NUM_PROCESSES"),
    "a folder that is a file": (
        {"OUTPUT_DIR": str(REPO / "LICENSE")},
        "LICENSE cannot be written",
    ),
    "no checkpoint": ({"RESUME": "nowhere"}, "RESUME=nowhere is not the folder of a complete"),
    "no bucket": ({"CHECKPOINT_DIR": "gs://bucket/run"}, "CHECKPOINT_DIR=gs://bucket/run: "),
}


# ---- Model folders -------------------------------------------------------------------------------


def change_json(name: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | values
        content = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(content))

    return change


def change_weights(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return changed


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


NORM = "model.norm.weight"
NO_TEMPLATE = {"chat_template": None}
BAD_TEMPLATE = {"chat_template": "{{ raise_exception('no') }}"}
FOLDERS = {  # what is wrong -> how it is made, words of the line
    "no config.json": (remove("config.json"), "has no config.json"),
    "an incomplete config.json": (write("config.json", "{"), "config.json is not JSON"),
    "another architecture": (
        change_json("config.json", model_type="gpt2"),
        "model_type='gpt2' is not supported",
    ),
    "a config without sizes": (
        change_json("config.json", hidden_size=None),
        "config.json has no 'hidden_size'",
    ),
    "a text for a truth value": (
        change_json("config.json", tie_word_embeddings="false"),
        "tie_word_embeddings='false' is not true or false",
    ),
    "a stop token that is a text": (
        change_json("config.json", eos_token_id="</s>"),
        "config.json: eos_token_id='</s>' is not a token id",
    ),
    "a wrong vocabulary": (change_json("config.json", vocab_size=64), "they are of two models"),
    "no tokenizer": (remove("tokenizer.json"), "has no tokenizer.json"),
    "a damaged tokenizer": (write("tokenizer.json", "{}"), "its tokenizer cannot be read"),
    "no chat template": (
        change_json("tokenizer_config.json", **NO_TEMPLATE),
        "has no chat template",
    ),
    "a chat template that fails": (
        change_json("tokenizer_config.json", **BAD_TEMPLATE),
        "its chat template fails",
    ),
    "a missing tensor": (change_weights(lambda t: t.pop(NORM)), f"lacks tensors {NORM}"),
    "an unknown tensor": (
        change_weights(lambda t: t.update(extra=t[NORM])),
        "has unknown tensors extra",
    ),
    "a wrong shape": (change_weights(lambda t: t.update({NORM: t[NORM][:-1]})), f"{NORM} is ["),
    "a wrong dtype": (
        change_weights(lambda t: t.update({NORM: t[NORM].astype(np.int32)})),
        f"{NORM} is I32",
    ),
    "truncated weights": (truncate, "is not a complete safetensors file"),
    "pickled weights": (pickled, "weights are read as safetensors"),
}


# ---- Datasets ------------------------------------------------------------------------------------

LINE = b'{"question": "1+1?", "answer": "#### 2"}\n'  # an example that has no mistake
HUGE = json.dumps({"question": "1 " * 50_000, "answer": "2"}).encode()
DATASETS = {  # what is wrong -> content of the file, words of the line
    "no file": (None, "no such file"),
    "no examples": (b"", "examples"),
    "a single example": (LINE, "needs 2 examples, to hold one out; it has 1"),
    "no question": (LINE + b'{"answer": "2"}\n', "line 2 has no text in 'question'"),
    "an empty answer": (
        LINE + b'{"question": "q", "answer": " "}\n',
        "line 2 has no text in 'answ",
    ),
    "a number for a text": (LINE + b'{"question": 1, "answer": "2"}\n', "line 2 has no text in"),
    "not UTF-8": (LINE + b'{"question": "\xff", "answer": "2"}\n', "line 2 is not UTF-8 text"),
    "not JSON": (LINE + b"question: 1\n", "line 2 is not JSON"),
    "an example that is a list": (LINE + b"[1]\n", "line 2 has no text in 'question'"),
    "a line nested too deep": (LINE + b"[" * 20_000, "line 2 is nested too deep"),
    "a huge question": (LINE * 20 + HUGE, "set MAX_PROMPT_LENGTH="),
}


# ---- Reward functions ----------------------------------------------------------------------------

HANGS = "import time\ndef reward(completions, **columns): time.sleep(99)"
REWARDS = {  # what is wrong -> source of the file, words of the line
    "no such function": ("def other(completions, **columns): return []", "reward"),
    "no Python": ("def reward(:", "SyntaxError"),
    "a wrong length": ("def reward(completions, **columns): return [1.0]", "16 rewards, not 1"),
    "no number": (
        "def reward(completions, **_): return ['a'] * len(completions)",
        "'a' is neither",
    ),
    "a function that hangs": (HANGS, "REWARD_TIMEOUT_S=1"),
}


# ---- The tests -----------------------------------------------------------------------------------


def mistake_of(env: dict[str, str]) -> str:
    """The mistake that the inputs of a run with these settings have."""
    with pytest.raises(UserMistake) as error:
        set_up(Config.from_env(env))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a few examples of tiny/."""
    folder = tmp_path_factory.mktemp("few")
    for name in ("train.jsonl", "test.jsonl"):
        lines = (REPO / "tiny" / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:32]), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(("env", "words"), INPUTS, ids=[words[:40] for _, words in INPUTS])
def test_a_setting_that_does_not_suit_the_inputs_is_named_in_one_line(env, words, few) -> None:
    assert words in mistake_of({"DATASET": few} | env)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_model_s_folder_with_a_mistake_is_named_in_one_line(tmp_path, few, name) -> None:
    damage, words = FOLDERS[name]
    model = tmp_path / "model"
    shutil.copytree(REPO / "tiny", model)
    damage(model)
    with pytest.raises(UserMistake) as error:
        run = set_up(Config.from_env({"DATASET": few, "MODEL_PATH": str(model)}))
        hf.load_params(run.folder, run.model, run.training.layout.mesh, np.float32)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_with_a_mistake_is_named_in_one_line(tmp_path, name) -> None:
    content, words = DATASETS[name]
    file = tmp_path / "mine.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert words in mistake_of({"DATASET": str(file)})


def train(out: Path, *flags: str, **env: str) -> Run:
    """The run that train of test_smoke.py makes, in a process that finds libraries imported."""
    script, env = REPO / "train_grpo.py", environment(out, forked.FASTER_TO_COMPILE | env)
    process = forked.start(script, *flags, cwd=out.parent, env=env)
    lines, errors = process.communicate(timeout=300)
    return Run(process.returncode, lines, errors, out)


def assert_ended(run: Run, words: str, *, leaves: bool = False) -> None:
    """The run has ended with exit code 2 and a line with these words, and left nothing but locks;
    leaves: it has made its files before it could find the mistake."""
    assert run.code == 2, run.errors
    last = run.errors.strip().splitlines()[-1]
    assert last.startswith("error: ") and words in last, run.errors
    assert "Traceback" not in run.errors
    left = [file for file in run.out.rglob("*") if file.is_file() and file.name != ".lock"]
    assert bool(left) == leaves


@pytest.mark.parametrize("name", RUNS)
def test_a_mistake_ends_a_run_in_one_line_with_exit_code_2(tmp_path, few, name) -> None:
    env, words = RUNS[name]
    assert_ended(train(tmp_path / "run", **{"DATASET": few} | env), words)


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_function_with_a_mistake_is_named_in_one_line(tmp_path, few, name) -> None:
    source, words = REWARDS[name]
    (tmp_path / "mine.py").write_text(source)
    env = {"REWARD_FN": f"{tmp_path}/mine.py:reward", "REWARD_TIMEOUT_S": "1", "DATASET": few}
    env |= {"EVAL_EVERY_STEPS": "0", "BATCH_SIZE": "2", "MAX_LENGTH_SAMPLE": "8", "STEPS": "1"}
    called = [*REWARDS].index(name) > 1  # the mistake shows when the function is called
    assert_ended(train(tmp_path / "run", **env), words, leaves=called)


def test_all_mistakes_in_settings_are_told_at_once_before_any_device_is_touched(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("train.step: 3\n")
    env = {"LERNING_RATE": "1", "NUM_GENERATIONS": "8", "TEMPERATURE": "0", "DELTA": "1.1"}
    run = train(tmp_path / "run", "--config", str(tmp_path / "run.yaml"), **env)
    expected = (
        "error: unknown setting LERNING_RATE; did you mean LEARNING_RATE?",
        "error: NUM_GENERATIONS is called NUM_PRE_Q here",
        "error: TEMPERATURE=0.0 must be above 0",
        f"error: {tmp_path}/run.yaml: unknown setting train.step; did you mean train.steps?",
        "error: DELTA=1.1 must be above 1 + EPS_HIGH",
    )
    assert (run.code, run.lines) == (2, "") and not run.out.exists()
    for line, words in zip(sorted(run.errors.splitlines()), sorted(expected), strict=True):
        assert line.startswith(words)


def test_at_least_fifty_mistakes_are_tried() -> None:
    assert len(INPUTS) + len(RUNS) + len(FOLDERS) + len(DATASETS) + len(REWARDS) >= 50
