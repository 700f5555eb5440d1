"""parsing.py: names, docs/settings.md, texts in YAML, .env files and the command line.

test_config.py has the tests of values and YAML.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import config
from config import Config
from runtime import parsing
from runtime.mistakes import NOT_SETTINGS, UserMistake
from runtime.parsing import REPO, read_dotenv
from runtime.records import read_settings
from tools import settings_page

# ---- Names ---------------------------------------------------------------------------------------

TYPOS = """
    LEARNING_RATES=LEARNING_RATE BATCHSIZE=BATCH_SIZE BACTH_SIZE=BATCH_SIZE NUM_PREQ=NUM_PRE_Q
    TOPK=TOP_K STESP=STEPS STEP=STEPS SEEDS=SEED MODEL_PTH=MODEL_PATH OPTIMISER=OPTIMIZER step=STEPS
    GLOBAL_LENTGH=GLOBAL_LENGTH ROLLOUT_DEVICE_BATCH_SIZE=ROLLOUT_PER_DEVICE_BATCH_SIZE
"""
# Of Linux, macOS, Windows, CI, clusters, clouds and other training scripts.
ORDINARY = """
    _ COLORTERM DISPLAY EDITOR HOME HOSTNAME LANG LC_ALL LESSOPEN LS_COLORS MAIL MANPATH OLDPWD PATH
    PWD SHELL SHLVL SSH_AUTH_SOCK TERM TMP TMPDIR TZ USER http_proxy LD_LIBRARY_PATH CC CFLAGS SED
    LIBPATH STEPPATH TOP MODULE_PATH MODULEPATH MODULESHOME MODEL MODEL_NAME COMMAND_MODE TEMP JOB
    APPDATA ComSpec HOMEPATH NUMBER_OF_PROCESSORS OS PATHEXT PSModulePath SystemRoot USERPROFILE CI
    GITHUB_STEP_SUMMARY GITHUB_OUTPUT STAGE_NAME SLURM_NTASKS_PER_NODE SLURM_STEP_ID CLOUDSDK_CONFIG
    KUBERNETES_SERVICE_HOST PJRT_DEVICE TPU_WORKER_ID JAX_COMPILATION_CACHE_DIRS XLA_FLAGS HF_HOME
    WANDB_PROJCT SGLANG_PORT PYTHONPATH VIRTUAL_ENV OMP_NUM_THREADS RANK MASTER_ADDR WORLD_SIZE
    BATCH BATCH_SIZES_DIR MY_BATCH_SIZE BATCH_SIZE_2 EVAL_BATCH_SIZE TRAIN_BATCH_SIZE SEED_FILE ETA
    DATASET_DIR DATASET_NAME OUTPUT OUTPUT_PATH TRAIN_STEPS BETA_DIR META TYPE STEMS TOPS MESH
    TPU_NAME TPU_TYPE ZONE PROJECT WORKER REF REPO_URL SSH_TIMEOUT_S PYTHON
"""


@pytest.mark.parametrize(("name", "meant"), [pair.split("=") for pair in TYPOS.split()])
def test_a_name_within_a_typo_of_a_setting_is_an_error(name: str, meant: str) -> None:
    with pytest.raises(UserMistake, match=f"unknown setting {name}; did you mean {meant}\\?"):
        Config.from_env({name: "1"})


CALLED = """
    LR=LEARNING_RATE GROUP_SIZE=NUM_PRE_Q NUM_GENERATIONS=NUM_PRE_Q MAX_NEW_TOKENS=MAX_LENGTH_SAMPLE
    MICRO_BATCH_SIZE=TRAIN_MICRO_BATCH_SIZE ROLLOUT_PROMPT_BATCH_SIZE=BATCH_SIZE
    MESH_SHAPE_FSDP=MESH_SHAPE ROLLOUT_ENGINE=ROLLOUT_BACKEND EPSILON=EPS_LOW
    NUM_ITERATIONS=PPO_EPOCHS MAX_COMPLETION_LENGTH=MAX_LENGTH_SAMPLE
    GRADIENT_ACCUMULATION_STEPS=GRAD_ACCUM_STEPS OPTIM=OPTIMIZER ROLLOUT_N=NUM_PRE_Q NUM_STEPS=STEPS
    NUM_GENERATIONS_EVAL=EVAL_SAMPLES MAX_LEN_SAMPLE=MAX_LENGTH_SAMPLE
    num_generations=NUM_PRE_Q Steps=STEPS CLIP_EPS=EPS_LOW GRAD_ACCUM=GRAD_ACCUM_STEPS
    EPSILON_LOW=EPS_LOW MODEL_ID=MODEL_PATH RANDOM_SEED=SEED EVAL_EVERY=EVAL_EVERY_STEPS
    ROLLOUT_TEMPERATURE=TEMPERATURE LOSS_BETA=BETA
"""
CALLED_IN_YAML = """
    rollout.n=rollout.num_pre_q model_path=model.path steps=train.steps wandb_mode=run.wandb_mode
    train.micro_batch_size_per_device=train.per_device_micro_batch_size LR=train.learning_rate
    optim.lr=train.learning_rate rollout.max_new_tokens=rollout.max_length_sample
"""
NOT_HERE = {
    "NUM_EPOCHS": "STEPS is the number of steps; an epoch has as many as ",
    "EVAL_BATCHES": "EVAL_PROMPTS is the number of questions in an evaluation",
    "MAX_LENGTH_TOTAL": "MAX_LENGTH_SAMPLE limits the completion and MAX_PROMPT_LENGTH the prompt",
    "MAX_LENGTH": "MAX_LENGTH_SAMPLE limits the completion and MAX_PROMPT_LENGTH the prompt",
    "WARMUP_STEPS": "WARMUP_RATIO is the fraction of the schedule that is warmup",
    "STEPS_PER_GENERATION": "NUM_MINI_BATCHES is the number of mini-batches into",
    "RESUME_FORCE": "to go on with other settings, set RESUME=RUN/checkpoints and a new OUTPUT_DIR",
    "DROP_ENDED": "it is always on where MAX_LENGTH_SAMPLE >= 128",
    "PPO_MINI_BATCH_SIZE": "NUM_MINI_BATCHES is the number of mini-batches into",
}


@pytest.mark.parametrize(("name", "ours"), [pair.split("=") for pair in CALLED.split()])
def test_the_names_of_other_programs_are_told_ours(name: str, ours: str) -> None:
    with pytest.raises(UserMistake) as error:
        Config.from_env({name: "1"})
    assert str(error.value) == f"{name} is called {ours} here (`python config.py` lists all)"


@pytest.mark.parametrize(("key", "ours"), [pair.split("=") for pair in CALLED_IN_YAML.split()])
def test_the_names_of_other_programs_in_yaml_are_told_ours(tmp_path, key: str, ours: str) -> None:
    (tmp_path / "run.yaml").write_text(f"{key}: 1")
    with pytest.raises(UserMistake, match=rf"run.yaml: {key} is called {ours} here \(`python"):
        Config.from_env({}, tmp_path / "run.yaml")


@pytest.mark.parametrize("name", NOT_HERE)
def test_a_name_without_a_counterpart_is_told_what_to_use_instead(tmp_path, name: str) -> None:
    with pytest.raises(UserMistake, match=f"^there is no setting {name}: {NOT_HERE[name]}"):
        Config.from_env({name: "1"})
    (tmp_path / "run.yaml").write_text(f"train: {{{name.lower()}: 1}}")
    with pytest.raises(
        UserMistake, match=f"there is no setting train.{name.lower()}: {NOT_HERE[name]}"
    ):
        Config.from_env({}, tmp_path / "run.yaml")


def test_other_names_are_no_settings_and_lead_to_settings() -> None:
    names = {field.name.upper() for field in dataclasses.fields(Config)}
    others = parsing.names_elsewhere(dataclasses.fields(Config))
    assert set(others.values()) <= names
    of_groups = {parsing.yaml_name(f).upper().replace(".", "_") for f in dataclasses.fields(Config)}
    assert not names & ({*others} - of_groups | {*NOT_SETTINGS})
    assert not others.keys() & NOT_SETTINGS.keys()


def test_processes_may_differ_in_what_they_write_and_how_long_they_wait() -> None:
    own = [f.name for f in dataclasses.fields(Config) if f.metadata["per_process"]]
    expected = "print_train_time_breakdown wandb_mode wandb_project wandb_name "
    expected += "jax_compilation_cache_dir init_timeout_s"
    assert own == expected.split()


# ---- docs/settings.md ----------------------------------------------------------------------------


def test_the_page_of_settings_is_what_the_command_prints() -> None:
    page = (REPO / "docs" / "settings.md").read_text(encoding="utf-8")
    told = "docs/settings.md is old: run `python tools/settings_page.py > docs/settings.md`"
    assert page == settings_page.page() + "\n", told
    assert max(map(len, page.splitlines())) <= 200
    assert len(page.splitlines()) <= 35 + len(dataclasses.fields(Config))


def test_the_page_names_limits_choices_yaml_names_and_processes() -> None:
    lines = settings_page.page().splitlines()
    for line in (
        "| setting | default | what it does | kept | per process |",
        "| **rollout** | | | | |",
        "| NUM_PRE_Q | 8 | K: number of completions per prompt. At least 1. | yes | no |",
        "| TOP_P | 1.0 | Sample within this probability mass. Above 0, at most 1. | yes | no |",
        "| KL_ESTIMATOR | k3 | Estimator of the KL. Choices: k1, k2, k3. | yes | no |",
        "| ROLLOUT_BATCH_SIZE, in YAML rollout.batch_size | 0 | Sequences per step over all "
        "processes; 0: not set. | no | no |",
        "| WANDB_PROJECT | empty | Project in W&B; empty: grpo. | no | yes |",
    ):
        assert line in lines


def test_every_help_text_is_short_and_ends_like_a_sentence() -> None:
    for field in dataclasses.fields(Config):
        help = field.metadata["help"]
        assert help[0].isupper() and help.endswith(".") and len(help) <= 90, field.name


# ---- All at once ---------------------------------------------------------------------------------


def test_all_mistakes_of_a_start_are_told_at_once(tmp_path: Path, capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout: {n: 4, temperature: 0}\nloss.delta: 1.1\n")
    env = {"LR": "1", "LERNING_RATE": "1", "NUM_PRE_Q": "eight", "NUM_EPOCHS": "3", "STEPS": "5"}
    with pytest.raises(SystemExit) as stop:
        config.load(["--config", str(file)], env | {"TOP_K": "200"})
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (`python")[0] for line in lines] == [
        "error: unknown setting LERNING_RATE; did you mean LEARNING_RATE?",
        "error: LR is called LEARNING_RATE here",
        "error: there is no setting NUM_EPOCHS: " + NOT_SETTINGS["NUM_EPOCHS"],
        "error: NUM_PRE_Q='eight' is not a whole number",
        f"error: {file}: rollout.n is called rollout.num_pre_q here",
        f"error: {file}: rollout.temperature=0.0 must be above 0",
        "error: DELTA=1.1 must be above 1 + EPS_HIGH = 1.2, where clipping begins",
        "error: TOP_K=200 is too many tokens to replay; set at most 128, or SAMPLING_SUPPORT=full",
    ]


def test_a_contradiction_with_a_value_that_cannot_be_read_is_not_told() -> None:
    with pytest.raises(UserMistake) as error:
        Config.from_env({"EPS_HIGH": "much", "DELTA": "1.1"})
    assert str(error.value) == "EPS_HIGH='much' is not a number"
    with pytest.raises(UserMistake) as error:  # without the model tiny's settings would hold
        Config.from_env({"MODEL_NAME_OR_PATH": "org/m", "NUM_PRE_Q": "1"})
    assert str(error.value).startswith("MODEL_NAME_OR_PATH is called MODEL_PATH here")
    assert "\n" not in str(error.value)


# ---- Texts in YAML -------------------------------------------------------------------------------

# Without quotes YAML reads these as numbers, dates, null or no text at all, or raises an error.
NO_TEXTS = """
    yes No ON off true FALSE null ~ 0x_ 0xF 0b_ 0o8 0123 1_000 1e3 1.0e+3 .5 .inf -.INF .nan
    12:30:45 1:0:0.5 2026-02-28 2026-02-30 2026-02-30T99:00:00 2026-02-28T12:00:00-99:00
    = << - ? : # & * ! %
    | > @ ` [a] {a} a: :a a:b a\\b it's a"b '' "" "x" --- ... C:\\x reinforce++ é 🙂 1,8,1
""".split()
SPACED = ["", " x", "x ", "a: b", "# x", "x # y", "- x", "? x", "a\nb", "\n", "a\tb", "\u2028"]
SPACED += ["9" * 5000, "1:" + "0:" * 400 + "0.5", "\x85", "\x07", "\x7f", "\ufeff", "a\r\nb"]


@pytest.mark.parametrize("text", NO_TEXTS + SPACED)
def test_any_text_is_written_so_that_yaml_reads_the_same_text(tmp_path: Path, text: str) -> None:
    cfg = Config(model_path="m", wandb_name=text, system_prompt=text)
    (tmp_path / "config.yaml").write_text(config.describe(cfg) + "\n", encoding="utf-8")
    assert Config.from_env({}, tmp_path / "config.yaml") == cfg
    settings = read_settings(tmp_path)
    assert (settings["run.wandb_name"], settings["data.system_prompt"]) == (text, text)


def test_plain_words_are_written_without_quotes() -> None:
    for text in "auto none openai/gsm8k a.py:f C:\\x run_2 v6e-8 reinforce++".split():
        assert parsing.to_text(text) == text
    assert parsing.to_text("off") == '"off"'
    assert parsing.to_text("2026-02-30") == '"2026-02-30"'


@pytest.mark.parametrize("text", ["2026-02-30", "0x_", "'", "a: b"])
def test_a_value_that_yaml_cannot_read_is_one_line_that_names_config_yaml(tmp_path, text) -> None:
    """A user may have edited the config.yaml of a run."""
    file = tmp_path / "config.yaml"
    file.write_text(f"run.wandb_name: {text}\n")
    with pytest.raises(UserMistake) as error:
        read_settings(tmp_path)
    told = str(error.value)
    assert told.startswith(f"{file} cannot be read: ") and "\n" not in told
    assert told.endswith("; mend it, or put the text in quotes")


def test_settings_that_are_nested_too_deep_are_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train.steps: " + "[" * 20_000)
    with pytest.raises(UserMistake, match=r"run.yaml cannot be read: [^\n]*recursion[^\n]*\Z"):
        Config.from_env({}, tmp_path / "run.yaml")


# ---- Lines about the settings of a run -----------------------------------------------------------


def test_every_changed_setting_is_told_with_the_layer_it_comes_from(tmp_path, monkeypatch) -> None:
    (tmp_path / ".env").write_text("SEED=3\nSTEPS=9\n")
    (tmp_path / "run.yaml").write_text("model.path: m\ntrain: {steps: 7, learning_rate: 1e-5}\n")
    monkeypatch.setattr(config, "REPO", tmp_path)
    for name in {field.name.upper() for field in dataclasses.fields(Config)} & os.environ.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("STEPS", "5")
    monkeypatch.setenv("NUM_PRE_Q", "8")  # its default
    monkeypatch.setenv("SYSTEM_PROMPT", "Be brief.")
    file = str(tmp_path / "run.yaml")
    assert config.load(["--config", file]).lines == [
        f'changed: MODEL_PATH=m ({file}) SYSTEM_PROMPT="Be brief." (environment) SEED=3 (.env) '
        f"STEPS=5 (environment) LEARNING_RATE=1e-05 ({file})"
    ]
    (told,) = config.load([], {"REWARD_FN": "a.py:f"}).lines
    assert "REWARD_FN=a.py:f (environment)" in told
    assert "NUM_PRE_Q" not in told and "STEPS=200 (recipes/tiny.yaml)" in told


def test_names_of_ordinary_machines_are_no_typos() -> None:
    Config.from_env(dict.fromkeys(ORDINARY.split(), "x"))


# ---- .env ----------------------------------------------------------------------------------------

WRITTEN = """
# keys
WANDB_API_KEY=0123abc
export HF_TOKEN="hf_x y"  # of the Hub
PLAIN=a#b # c
  SYSTEM_PROMPT='a = "b" # c'
EMPTY=
HOME_OF=$HOME/`touch {made}`$(touch {made})
MIXED="half'
"""


def test_a_dotenv_file_is_read_as_text_and_never_executed(tmp_path: Path) -> None:
    made, file = tmp_path / "made", tmp_path / ".env"
    for text in (WRITTEN, WRITTEN.replace("\n", "\r\n"), "\ufeff" + WRITTEN):
        file.write_bytes(text.replace("{made}", str(made)).encode())
        assert read_dotenv(file) == {
            "WANDB_API_KEY": "0123abc",
            "HF_TOKEN": "hf_x y",
            "PLAIN": "a#b",
            "SYSTEM_PROMPT": 'a = "b" # c',
            "EMPTY": "",
            "HOME_OF": f"$HOME/`touch {made}`$(touch {made})",
            "MIXED": "\"half'",
        }
    assert not made.exists()
    assert read_dotenv(tmp_path / "nowhere") == {}


def test_a_bad_line_of_a_dotenv_file_is_named_by_its_number_alone(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    for line in ("my secret key", "my-name=secret", "=secret", "\xe9=secret", "A=secret\0"):
        file.write_text(f"A=1\n{line}", encoding="utf-8")
        with pytest.raises(UserMistake, match=r"\.env: line 2 is not NAME=value$") as error:
            read_dotenv(file)
        assert "secret" not in str(error.value)
    file.write_bytes(b"A=\xff")
    with pytest.raises(UserMistake, match="cannot be read: UnicodeDecodeError"):
        read_dotenv(file)


def test_a_dotenv_file_beside_the_code_lies_below_the_environment(tmp_path, monkeypatch) -> None:
    (tmp_path / ".env").write_text("STEPS=7\nNUM_PRE_Q=4\nA_KEY=secret\n")
    monkeypatch.setattr(config, "REPO", tmp_path)
    monkeypatch.setattr(config.os, "environ", {"NUM_PRE_Q": "2"})
    cfg = config.load([]).cfg
    assert (cfg.steps, cfg.num_pre_q) == (7, 2)
    assert config.os.environ == {"NUM_PRE_Q": "2", "STEPS": "7", "A_KEY": "secret"}
    assert "secret" not in config.describe(cfg)


# ---- null in YAML --------------------------------------------------------------------------------


def test_null_in_the_environment_means_what_it_means_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout: {batch_size: 64}\nrun: {wandb_name: mine}\n")
    env = {"MODEL_PATH": "m", "ROLLOUT_BATCH_SIZE": "null", "WANDB_NAME": "null", "STEPS": "null"}
    cfg = Config.from_env(env, file)
    assert (cfg.rollout_batch_size, cfg.wandb_name, cfg.steps) == (64, "", 100)


def test_the_values_of_other_programs_are_told_ours() -> None:
    for name, text, listed, ours in (
        ("ROLLOUT_BACKEND", "vanilla", "naive|sglang_jax", "naive"),
        ("KL_ESTIMATOR", "low_var_kl", "k1|k2|k3", "k3"),
    ):
        told = f"{name}={text!r} is not one of {listed}; {text} is called {ours} here"
        with pytest.raises(UserMistake, match=re.escape(told)):
            Config.from_env({name: text})


def test_null_unsets_any_size_and_leaves_the_lower_layers_alone(tmp_path: Path) -> None:
    """As the published documents write it."""
    file = tmp_path / "run.yaml"
    text = "rollout: {batch_size: null, per_device_batch_size: null, global_prompt_batch_size: }\n"
    text += "train: {micro_batch_size: null, per_device_micro_batch_size: ~, steps: null}\n"
    file.write_text("model.path: m\n" + text)
    assert Config.from_env({}, file) == Config(model_path="m")
    file.write_text(text)
    assert Config.from_env({}, file) == Config.from_env({})
    assert Config.from_env({"ROLLOUT_BATCH_SIZE": "8"}, file).rollout_batch_size == 8


# ---- The command line ----------------------------------------------------------------------------


def test_a_reader_that_closes_the_pipe_ends_the_print_without_a_traceback() -> None:
    """As `head -1` does."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "config.py"]
    ended = subprocess.run(command, cwd=REPO, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("script", ["config.py", "startup.py"])
def test_a_plan_is_refused_where_nothing_plans(script: str) -> None:
    command = [sys.executable, script, "--plan", "v6e-8"]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        "error: --plan, --eval-only and --ask are only for train_grpo.py"
    )


def test_negative_numbers_and_texts_with_spaces_are_values(capsys: pytest.CaptureFixture) -> None:
    for text in ("-5", "-0.5", "-1 and 1/2"):
        args = parsing.parse_command_line(["--ask", "-5 + 3 = ?", "--answer", text])
        assert (args.ask, args.answer) == ("-5 + 3 = ?", text)
    assert parsing.parse_command_line(["--ask", "x", "--answer=-1/2"]).answer == "-1/2"
    for flags in (["--answer", "--eval-only"], ["--answer"]):
        with pytest.raises(SystemExit):
            parsing.parse_command_line(["--ask", "How many?", *flags])
        assert capsys.readouterr().err.endswith("argument --answer: expected one argument\n")
