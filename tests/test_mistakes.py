"""A mistake of a user ends in one line that names the setting or file, and in exit code 2."""

import json
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import forked
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from test_smoke import REPO, Run, environment

# ---- Found before any device is touched ----------------------------------------------------------

SETTINGS = [  # environment, words of the line
    ({"LERNING_RATE": "1"}, "unknown setting LERNING_RATE; did you mean LEARNING_RATE?"),
    ({"NUM_GENERATIONS": "8"}, "NUM_GENERATIONS is called NUM_PRE_Q here"),
    ({"NUM_PRE_Q": "eight"}, "NUM_PRE_Q='eight' is not a whole number"),
    ({"STEPS": "-1"}, "STEPS=-1 must be at least 0"),
    ({"TEMPERATURE": "0"}, "TEMPERATURE=0.0 must be above 0"),
    ({"TOP_P": "1.5"}, "TOP_P=1.5 must be at most 1"),
    ({"LEARNING_RATE": "nan"}, "LEARNING_RATE='nan' is not finite"),
    ({"EVAL_FULL_SWEEP": "maybe"}, "EVAL_FULL_SWEEP='maybe' is not a bool"),
    ({"OPTIMIZER": "adam"}, "OPTIMIZER='adam' is not one of adamw|"),
    ({"MESH_SHAPE": "8x1"}, "MESH_SHAPE='8x1' does not have the right form"),
    ({"REWARD_WEIGHTS": "1,1"}, "REWARD_WEIGHTS=1.0,1.0 has 2 numbers; give 3"),
    ({"NUM_PRE_Q": "1"}, "NUM_PRE_Q=1 leaves ADV_ESTIMATOR=grpo nothing to compare"),
    ({"DELTA": "1.1"}, "DELTA=1.1 must be above 1 + EPS_HIGH"),
    ({"KL_ESTIMATOR": "k1"}, "KL_ESTIMATOR=k1 does nothing with BETA=0"),
    ({"LOSS_TYPE": "cispo"}, "EPS_HIGH=0.2"),
    ({"REF_SYNC_STEPS": "5"}, "REF_SYNC_STEPS=5 does nothing with BETA=0"),
    ({"ROLLOUT_BACKEND": "vllm"}, "ROLLOUT_BACKEND='vllm' is not one of"),
    ({"OUTPUT_DIR": "gs://bucket/run"}, "CHECKPOINT_DIR may be gs://"),
    ({"PREEMPTION_GRACE_S": "1"}, "PREEMPTION_GRACE_S=1 must be at least 2"),
]


FILES = {  # the text of run.yaml, or None for a file that is not there -> words of the line
    None: "run.yaml cannot be read",
    "train: {steps: [1": "run.yaml cannot be read",
    "train.step: 3": "run.yaml: unknown setting train.step; did you mean train.steps?",
    "train: {steps: 1}\ntrain.steps: 2": "train.steps is set twice",
    "- 1": "run.yaml holds a sequence",
}

# ---- Sizes, devices, rewards, outputs ------------------------------------------------------------

SIZES = [
    ({"TRAIN_MICRO_BATCH_SIZE": "7"}, "TRAIN_MICRO_BATCH_SIZE=7 must divide local_batch"),
    ({"ROLLOUT_BATCH_SIZE": "100"}, "ROLLOUT_BATCH_SIZE=100 must be a multiple of"),
    ({"GRAD_ACCUM_STEPS": "3"}, "GRAD_ACCUM_STEPS=3 must divide local_batch"),
    ({"REQUIRE_MULTIHOST": "1"}, "REQUIRE_MULTIHOST=1, and this process is alone"),
    ({"REQUIRE_JAX_PROCESS_COUNT": "2"}, "REQUIRE_JAX_PROCESS_COUNT=2, and 1 joined"),
]
FUNCTIONS = [
    ({"REWARD_FN": "mine.py:reward"}, "REWARD_FN: there is no file mine.py"),
    ({"REWARD_FN": "reward"}, "REWARD_FN: 'reward' is not file.py:name"),
]
RUN = [
    ({"POLICY_LOSS_IMPL": "pallas"}, "POLICY_LOSS_IMPL=pallas needs DTYPE=bfloat16 on a TPU"),
    (
        {"MESH_SHAPE": "1,3,1"},
        "MESH_SHAPE=1,3,1 is a mesh of 3 devices, but the run has 1; set MESH_SHAPE=auto",
    ),
    ({"JAX_PLATFORMS": "rocm"}, "JAX_PLATFORMS=rocm: no such device here"),
    ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}, "needs JAX_NUM_PROCESSES"),
    ({"MAX_PROMPT_LENGTH": "5"}, "MAX_PROMPT_LENGTH=5: every train prompt is longer"),
    ({"MAX_PROMPT_LENGTH": "60", "PROMPT_TOO_LONG": "error"}, "MAX_PROMPT_LENGTH=60: "),
    ({"MAX_LENGTH_SAMPLE": "5000"}, "MAX_LENGTH_SAMPLE=5000 after the longest prompt"),
    ({"SYSTEM_PROMPT": "prompts/mine.txt"}, "SYSTEM_PROMPT=prompts/mine.txt: no such file"),
    ({"OUTPUT_DIR": str(REPO / "LICENSE")}, "LICENSE cannot be written"),
    # After a mistake the examples of a hub's dataset are not read.
    ({"EXPORT_HF": str(REPO / "LICENSE"), "DATASET": "openai/gsm8k"}, "LICENSE cannot be written"),
    ({"RESUME": "nowhere"}, "RESUME=nowhere is not the folder of a complete checkpoint"),
    ({"EXPORT_HF": str(REPO / "tiny")}, "is MODEL_PATH; the model would be overwritten"),
    ({"CHECKPOINT_DIR": "gs://bucket/run"}, "CHECKPOINT_DIR=gs://bucket/run: "),
    ({"ATTENTION_IMPL": "splash"}, "ATTENTION_IMPL=splash: it is a TPU kernel"),
    ({"MODEL_PATH": "no/such/folder"}, "MODEL_PATH=no/such/folder: no such folder"),
]


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


# These are found when the prompts are made, which needs a model and data without mistakes.
WITH_PROMPTS = ("a chat template that fails", "a huge question")


# ---- The runs ------------------------------------------------------------------------------------


class Case(NamedTuple):
    env: dict[str, str]
    words: str  # of the line
    flags: tuple[str, ...] = ()
    kind: str = ""  # a run reports mistakes of different kinds together; "": it is reported alone
    early: bool = False  # found before any device is touched
    leaves: bool = False  # the run has made OUTPUT_DIR before it could find the mistake


def cases(folder: Path) -> dict[str, Case]:
    """{name: case} of all mistakes; this writes their files into `folder`."""
    found = {}
    for env, words in SETTINGS:
        found[" ".join(env)] = Case(env, words, early=True)
    for i, (text, words) in enumerate(FILES.items()):
        file = folder / str(i) / "run.yaml"
        file.parent.mkdir()
        if text is not None:
            file.write_text(text)
        found[f"run.yaml {i}"] = Case({}, words, ("--config", str(file)), early=True)
    for kind, listed in {"sizes": SIZES, "rewards": FUNCTIONS, "": RUN}.items():
        for env, words in listed:
            found[f"run with {' '.join(env)} {words[:20]}"] = Case(env, words, kind=kind)
    for name, (damage, words) in FOLDERS.items():
        model = folder / name
        shutil.copytree(REPO / "tiny", model)
        damage(model)
        kind = "" if name in WITH_PROMPTS else "model"
        found[f"a model with {name}"] = Case({"MODEL_PATH": str(model)}, words, kind=kind)
    for name, (content, words) in DATASETS.items():
        file = folder / f"{name}.jsonl"
        if content is not None:
            file.write_bytes(content)
        kind = "" if name in WITH_PROMPTS else "data"
        found[f"a dataset: {name}"] = Case({"DATASET": str(file)}, words, kind=kind)
    for i, (name, (source, words)) in enumerate(REWARDS.items()):
        file = folder / f"mine{i}.py"
        file.write_text(source)
        env = {"REWARD_FN": f"{file}:reward", "REWARD_TIMEOUT_S": "1", "STEPS": "1"}
        env |= {"EVAL_EVERY_STEPS": "0", "BATCH_SIZE": "2", "MAX_LENGTH_SAMPLE": "8"}
        called = i > 1  # the mistake shows when the function is called
        kind = "" if called else "rewards"
        found[f"a reward: {name}"] = Case(env, words, kind=kind, leaves=called)
    return found


def train(out: Path, *flags: str, **env: str) -> Run:
    """The run that train of test_smoke.py makes, in a process that finds libraries imported."""
    script, env = REPO / "train_grpo.py", environment(out, forked.FASTER_TO_COMPILE | env)
    process = forked.start(script, *flags, cwd=out.parent, env=env)
    lines, errors = process.communicate(timeout=300)
    return Run(process.returncode, lines, errors, out)


def share_runs(all_cases: dict[str, Case]) -> list[dict[str, Case]]:
    """The cases of each run: one alone, or one of each kind."""
    runs: list[dict[str, Case]] = []
    for name, case in all_cases.items():
        kinds = [{other.kind for other in run.values()} for run in runs]
        fits = [run for run, has in zip(runs, kinds, strict=True) if not has & {"", case.kind}]
        if case.kind and fits:
            fits[0][name] = case
        else:
            runs.append({name: case})
    return runs


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, Run]]:
    """{name: (case, end of its run)}; two runs go on at a time, on a few examples of tiny/."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "few").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        lines = (REPO / "tiny" / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "few" / name).write_text("".join(lines[:32]), encoding="utf-8")

    def run(item: tuple[int, dict[str, Case]]) -> dict[str, tuple[Case, Run]]:
        number, shared = item
        env = {"DATASET": str(folder / "few")}
        for case in shared.values():
            env |= case.env
        (folder / f"run{number}").mkdir()
        flags = [flag for case in shared.values() for flag in case.flags]
        end = train(folder / f"run{number}" / "out", *flags, **env)
        return {name: (case, end) for name, case in shared.items()}

    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(run, enumerate(share_runs(cases(folder))))
        return {name: end for found in ends for name, end in found.items()}


def names() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return [*cases(Path(folder))]


@pytest.mark.parametrize("name", names())
def test_a_mistake_ends_a_run_in_one_line_with_exit_code_2(
    outcomes: dict[str, tuple[Case, Run]], name: str
) -> None:
    case, run = outcomes[name]
    assert run.code == 2, run.errors
    lines = run.errors.strip().splitlines()
    told = [line for line in lines if line.startswith("error: ")]
    assert lines[-1] in told and any(case.words in line for line in told), run.errors
    assert "Traceback" not in run.errors
    assert not case.early or "backend=" not in run.lines, "no device was touched before"
    left = [file for file in run.out.rglob("*") if file.is_file() and file.name != ".lock"]
    assert bool(left) == case.leaves, "nothing but locks is left behind"


def test_mistakes_in_different_files_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(b"")
    env = {"TRAIN_MICRO_BATCH_SIZE": "7", "REWARD_FN": "mine.py:reward", "DATASET": str(file)}
    env |= {"EXPORT_HF": str(file / "hf")}
    run = train(tmp_path / "run", MODEL_PATH=str(tmp_path / "none"), **env)
    assert run.code == 2 and not run.out.exists()
    lines = run.errors.strip().splitlines()
    expected = (
        f"error: EXPORT_HF={file}/hf cannot be written: {file} is not a folder",
        "error: TRAIN_MICRO_BATCH_SIZE=7 must divide local_batch",
        "error: REWARD_FN: there is no file mine.py",
        f"error: MODEL_PATH={tmp_path}/none: this folder does not exist",
        f"error: DATASET={file} needs 2 examples, to hold one out; it has 0",
    )
    for line, words in zip(lines, expected, strict=True):
        assert line.startswith(words)


def test_after_a_mistake_nothing_is_asked_of_the_hub(tmp_path: Path) -> None:
    hub = {"MODEL_PATH": "nobody/no-model", "DATASET": "nobody/no-dataset", "HF_HUB_OFFLINE": "1"}
    ended = train(tmp_path / "a", **hub, REWARD_FN="absent.py:f")
    assert (ended.code, "hub says" in ended.errors) == (2, False), ended.errors
    assert "REWARD_FN: there is no file absent.py" in ended.errors


def test_at_least_seventy_mistakes_are_tried() -> None:
    assert len(names()) >= 70
