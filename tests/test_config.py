"""config.py and infra/settings.py: layers, names, values, the print and the command line.

Every mistake is one line that names the setting and, of a file, where it stands.
"""

import dataclasses
import os
import pwd
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import REPO

import config
from config import Config
from infra import settings
from infra.log import read_settings
from infra.mistakes import UserMistake
from infra.settings import read_dotenv
from infra.sizes import Sizes, derive_sizes
from train_sft import customize_settings

REAL = "MODEL_PATH=some/model"  # a run without recipes/tiny.yaml
FIELDS = dataclasses.fields(Config)


def env(settings: str) -> dict[str, str]:
    return dict(setting.split("=", 1) for setting in settings.split())


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    return tmp_path / "run.yaml"


def error_lines(capsys: pytest.CaptureFixture, argv: list[str], settings: dict) -> list[str]:
    """The lines of a start that ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        config.load(argv, settings)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()


# ---- Defaults and layers -------------------------------------------------------------------------


def test_the_environment_wins_over_a_file_the_file_over_tiny_and_tiny_over_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the tiny model is found from any folder
    cfg = Config.from_env({"MODEL_PATH": ""})
    assert (cfg.model_path, cfg.dataset, cfg.steps) == (f"{REPO}/tiny", f"{REPO}/tiny", 200)
    cfg = Config.from_env({}, write(tmp_path, "data.dataset: mine.jsonl\nmodel.path: ''\n"))
    assert (cfg.model_path, cfg.dataset, cfg.steps) == (f"{REPO}/tiny", "mine.jsonl", 200)
    file = write(tmp_path, "model.path: m\ntrain:\n  steps: 7\n  learning_rate: 1e-5\n")
    cfg = Config.from_env({"STEPS": "9"}, file)
    assert (cfg.steps, cfg.learning_rate, cfg.dataset) == (9, 1e-5, "openai/gsm8k")


def test_a_size_hides_its_synonyms_in_the_file_and_nothing_else(tmp_path: Path) -> None:
    text = "model.path: m\nrollout.per_device_batch_size: 2\nrollout.batch_size: 256\n"
    file = write(tmp_path, text + "train.micro_batch_size: 16\n")
    for setting, batch in {
        "BATCH_SIZE=0": Sizes(128, 256, 8, 2, 16, 8, 32),  # 0 means not set, and hides nothing
        "BATCH_SIZE=4": Sizes(128, 256, 4, 4, 16, 8, 32),
        "ROLLOUT_GLOBAL_BATCH_SIZE=16": Sizes(64, 128, 8, 1, 16, 4, 16),
        "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE=1": Sizes(128, 256, 8, 2, 4, 32, 32),
    }.items():
        assert derive_sizes(Config.from_env(env(setting), file), 2, 4) == batch, setting


def test_the_sizes_of_the_tiny_recipe_give_way_to_any_size_of_the_user() -> None:
    for name in ("BATCH_SIZE", "ROLLOUT_PER_DEVICE_BATCH_SIZE", "ROLLOUT_BATCH_SIZE"):
        cfg = Config.from_env({name: "24"})
        assert (cfg.rollout_global_batch_size, cfg.train_micro_batch_size) == (0, 0), name
    for name in ("TRAIN_PER_DEVICE_MICRO_BATCH_SIZE", "NUM_PRE_Q"):
        cfg = Config.from_env({name: "3"})
        assert (cfg.rollout_global_batch_size, cfg.train_micro_batch_size) == (16, 0), name


def test_null_is_a_size_that_is_not_set_or_an_empty_text(tmp_path: Path) -> None:
    """As the published documents write it, in the environment and in YAML."""
    text = "rollout: {batch_size: null, per_device_batch_size: null, global_prompt_batch_size: }\n"
    text += "train: {micro_batch_size: null, per_device_micro_batch_size: , steps: null}\n"
    assert Config.from_env({}, write(tmp_path, text)) == Config.from_env({})
    file = write(tmp_path, "rollout: {batch_size: 64}\nrun: {wandb_name: mine}\n")
    settings = "ROLLOUT_BATCH_SIZE=null WANDB_NAME=null STEPS=null"
    cfg = Config.from_env(env(f"{REAL} {settings}"), file)
    assert (cfg.rollout_batch_size, cfg.wandb_name, cfg.steps) == (64, "", 100)


def test_every_changed_setting_is_told_with_the_layer_it_comes_from(tmp_path, monkeypatch) -> None:
    (tmp_path / ".env").write_text("SEED=3\nSTEPS=9\nA_KEY=secret\n")
    file = str(write(tmp_path, "model.path: m\ntrain: {steps: 7, learning_rate: 1e-5}\n"))
    given = {"STEPS": "5", "NUM_PRE_Q": "8", "SYSTEM_PROMPT": "Be brief."}  # 8 is the default
    monkeypatch.setattr(config, "REPO", tmp_path)
    monkeypatch.setattr(config.os, "environ", given)
    assert config.load(["--config", file])[2][0] == (
        f'changed: MODEL_PATH=m ({file}) SYSTEM_PROMPT="Be brief." (environment) SEED=3 (.env) '
        f"STEPS=5 (environment) LEARNING_RATE=1e-05 ({file})"
    )
    assert (given["SEED"], given["A_KEY"]) == ("3", "secret")  # where W&B and the Hub find keys
    (told,) = config.load([], {"REWARD_FN": "a.py:f"})[2]
    assert "REWARD_FN=a.py:f (environment)" in told
    assert "NUM_PRE_Q" not in told and "STEPS=200 (recipes/tiny.yaml)" in told


def test_the_commands_read_the_settings_of_a_run_whose_folder_is_behind_a_tilde(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    write(tmp_path, "rollout.max_length_sample: 77\n").rename(tmp_path / "config.yaml")
    for folder in (str(tmp_path), f"~/{tmp_path.name}/"):
        cfg = config.load(["--eval-only"], {"OUTPUT_DIR": folder})[0]
        assert cfg.max_length_sample == 77 and Path(cfg.output_dir) == tmp_path


def test_a_folder_that_the_system_does_not_look_into_has_no_traceback(capsys) -> None:
    """Such as that of another user. Here its name is too long, which also root cannot read."""
    for customize in (None, customize_settings):
        config.load([], {"MODEL_PATH": "x" * 300}, customize)
    (line,) = error_lines(capsys, ["--probe", "9"], {"OUTPUT_DIR": "x" * 300})
    assert line.startswith(f"error: {'x' * 300}/config.yaml cannot be read: OSError: ")


# ---- Values --------------------------------------------------------------------------------------

GOOD = [
    ("EVAL_FULL_SWEEP=True", True),
    ("NUM_PRE_Q= 4 ", 4),
    ("REWARD_WEIGHTS=1, -0.25,0", (1.0, -0.25, 0.0)),
    ("REWARD_WEIGHTS=", ()),
    ("SYSTEM_PROMPT=Think.\nThen answer: 1", "Think.\nThen answer: 1"),
    ("DATASET={repo}/tiny/train.jsonl", str(REPO / "tiny" / "train.jsonl")),
    ("DATASET=~/mine.jsonl", str(Path.home() / "mine.jsonl")),
    ("MODEL_PATH=~root/m", pwd.getpwnam("root").pw_dir + "/m"),
]


@pytest.mark.parametrize(("setting", "value"), GOOD)
def test_a_good_setting_is_read_as_its_type(setting: str, value: object) -> None:
    name, text = setting.split("=", 1)
    read = getattr(Config.from_env({name: text}), name.lower())
    assert (read, type(read)) == (value, type(value))


# ---- Names ---------------------------------------------------------------------------------------

TYPOS = """
    LERNING_RATE=LEARNING_RATE BATCHSIZE=BATCH_SIZE BACTH_SIZE=BATCH_SIZE NUM_PREQ=NUM_PRE_Q
    TOPK=TOP_K STESP=STEPS STEP=STEPS SEEDS=SEED MODEL_PTH=MODEL_PATH OPTIMISER=OPTIMIZER step=STEPS
    GLOBAL_LENTGH=GLOBAL_LENGTH ROLLOUT_DEVICE_BATCH_SIZE=ROLLOUT_PER_DEVICE_BATCH_SIZE
    KL_COEFF=BETA
"""
# The most similar of Linux, macOS, Windows, CI, clusters, clouds and other training scripts.
ORDINARY = """
    _ OLDPWD PATH TMPDIR http_proxy SED LIBPATH STEPPATH TOP MODULE_PATH MODULEPATH MODEL MODEL_NAME
    COMMAND_MODE TEMP OS ComSpec HOMEPATH GITHUB_STEP_SUMMARY STAGE_NAME SLURM_STEP_ID RANK
    JAX_COMPILATION_CACHE_DIRS WANDB_PROJCT SGLANG_PORT TPU_NAME BATCH BATCH_SIZES_DIR MY_BATCH_SIZE
    BATCH_SIZE_2 EVAL_BATCH_SIZE TRAIN_BATCH_SIZE SEED_FILE ETA DATASET_DIR DATASET_NAME OUTPUT
    OUTPUT_PATH BETA_DIR META TYPE STEMS TOPS MESH MAX_TOKENS
"""
# What environments set for their own purposes, from their documentation: no line, and no error.
ENVIRONMENTS = {
    "torchrun": """
        LOCAL_RANK RANK GROUP_RANK ROLE_RANK LOCAL_WORLD_SIZE WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR
        MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID
        TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING
        GROUP_WORLD_SIZE ROLE_NAME PYTHON_EXEC OMP_NUM_THREADS NODE_RANK NUM_NODES NNODES
        NUM_TRAINERS HOST_NODE_ADDR JOB_ID PET_NNODES PET_NODE_RANK NPROC_PER_NODE
    """,
    "Slurm": """
        SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_COUNT SLURM_ARRAY_TASK_ID SLURM_ARRAY_TASK_MAX
        SLURM_ARRAY_TASK_MIN SLURM_ARRAY_TASK_STEP SLURM_CLUSTER_NAME SLURM_CONF SLURM_CPUS_ON_NODE
        SLURM_CPUS_PER_GPU SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_CPU_BIND_TYPE SLURM_DISTRIBUTION
        SLURM_EXPORT_ENV SLURM_GPUS SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK
        SLURM_GTIDS SLURM_HET_SIZE SLURM_JOBID SLURM_JOB_ACCOUNT SLURM_JOB_CPUS_PER_NODE
        SLURM_JOB_DEPENDENCY SLURM_JOB_END_TIME SLURM_JOB_GPUS SLURM_JOB_ID SLURM_JOB_NAME
        SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_JOB_QOS
        SLURM_JOB_START_TIME SLURM_JOB_UID SLURM_JOB_USER SLURM_LAUNCH_NODE_IPADDR SLURM_LOCALID
        SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_MPI_TYPE SLURM_NNODES
        SLURM_NODEID SLURM_NODELIST SLURM_NODE_ALIASES SLURM_NPROCS SLURM_NTASKS
        SLURM_NTASKS_PER_NODE SLURM_OVERCOMMIT SLURM_PRIO_PROCESS SLURM_PROCID SLURM_PROFILE
        SLURM_RESTART_COUNT SLURM_SRUN_COMM_PORT SLURM_STEPID SLURM_STEP_GPUS SLURM_STEP_ID
        SLURM_STEP_LAUNCHER_PORT SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS
        SLURM_STEP_TASKS_PER_NODE SLURM_SUBMIT_DIR SLURM_SUBMIT_HOST SLURM_TASKS_PER_NODE
        SLURM_TASK_PID SLURM_THREADS_PER_CORE SLURMD_NODENAME SLURM_TOPOLOGY_ADDR
        SLURM_TOPOLOGY_ADDR_PATTERN SLURM_UMASK SLURM_WORKING_CLUSTER TMPDIR SBATCH_PARTITION
        SBATCH_TIMELIMIT SALLOC_ACCOUNT SRUN_DEBUG GPU_DEVICE_ORDINAL CUDA_VISIBLE_DEVICES
        ROCR_VISIBLE_DEVICES PMI_RANK PMI_SIZE PMIX_RANK
    """,
    "GitHub Actions": """
        CI GITHUB_ACTION GITHUB_ACTIONS GITHUB_ACTION_PATH GITHUB_ACTION_REPOSITORY GITHUB_ACTOR
        GITHUB_ACTOR_ID GITHUB_API_URL GITHUB_BASE_REF GITHUB_ENV GITHUB_EVENT_NAME
        GITHUB_EVENT_PATH GITHUB_GRAPHQL_URL GITHUB_HEAD_REF GITHUB_JOB GITHUB_OUTPUT GITHUB_PATH
        GITHUB_REF GITHUB_REF_NAME GITHUB_REF_PROTECTED GITHUB_REF_TYPE GITHUB_REPOSITORY
        GITHUB_REPOSITORY_ID GITHUB_REPOSITORY_OWNER GITHUB_REPOSITORY_OWNER_ID
        GITHUB_RETENTION_DAYS GITHUB_RUN_ATTEMPT GITHUB_RUN_ID GITHUB_RUN_NUMBER GITHUB_SERVER_URL
        GITHUB_SHA GITHUB_STATE GITHUB_STEP_SUMMARY GITHUB_TOKEN GITHUB_TRIGGERING_ACTOR
        GITHUB_WORKFLOW GITHUB_WORKFLOW_REF GITHUB_WORKFLOW_SHA GITHUB_WORKSPACE RUNNER_ARCH
        RUNNER_DEBUG RUNNER_ENVIRONMENT RUNNER_NAME RUNNER_OS RUNNER_PERFLOG RUNNER_TEMP
        RUNNER_TOOL_CACHE RUNNER_TRACKING_ID RUNNER_USER RUNNER_WORKSPACE ACTIONS_CACHE_URL
        ACTIONS_RUNTIME_TOKEN ACTIONS_RUNTIME_URL ACTIONS_STEP_DEBUG AGENT_TOOLSDIRECTORY
        ANDROID_HOME ANDROID_SDK_ROOT CHROME_BIN CONDA DEPLOYMENT_BASEPATH DOTNET_NOLOGO
        GOROOT_1_22_X64 HOMEBREW_NO_AUTO_UPDATE ImageOS ImageVersion INVOCATION_ID JAVA_HOME
        JAVA_HOME_17_X64 JOURNAL_STREAM NVM_DIR PIPX_BIN_DIR PIPX_HOME SYSTEMD_EXEC_PID
        POWERSHELL_DISTRIBUTION_CHANNEL SELENIUM_JAR_PATH SGX_AESM_ADDR SWIFT_PATH VCPKG_ROOT
        VCPKG_INSTALLATION_ROOT XDG_CONFIG_HOME XDG_RUNTIME_DIR pythonLocation Python_ROOT_DIR
        Python3_ROOT_DIR PKG_CONFIG_PATH LD_LIBRARY_PATH BOOTSTRAP_HASKELL_NONINTERACTIVE
        EDGEWEBDRIVER
    """,
    "Kaggle": """
        KAGGLE_KERNEL_RUN_TYPE KAGGLE_KERNEL_INTEGRATIONS KAGGLE_DATA_PROXY_PROJECT
        KAGGLE_DATA_PROXY_TOKEN KAGGLE_DATA_PROXY_URL KAGGLE_USER_SECRETS_TOKEN KAGGLE_URL_BASE
        KAGGLE_DATASET_PATH KAGGLE_GYM_DATASET_PATH KAGGLE_WORKING_DIR KAGGLE_CONTAINER_NAME
        KAGGLE_GRPC_DATA_PROXY_URL KAGGLE_DOCKER_IMAGE KAGGLE_TPU KAGGLE_API_TOKEN KAGGLE_USERNAME
        KAGGLE_KEY KAGGLE_CONFIG_DIR KAGGLE_PROXY KAGGLE_BQ_USER_JWT BUILD_DATE GIT_COMMIT
        TESSERACT_PATH MKL_THREADING_LAYER MPLBACKEND PYTHONUSERBASE PROJ_LIB JPY_PARENT_PID
        JPY_SESSION_NAME JUPYTER_CONFIG_DIR TF_CPP_MIN_LOG_LEVEL ANACONDA_PYTHON_VERSION CLICOLOR
        CUDA_VERSION CUDA_MAJOR_VERSION NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES
        PYTORCH_CUDA_ALLOC_CONF XRT_TPU_CONFIG ISTPUVM TPU_ACCELERATOR_TYPE TPU_PROCESS_ADDRESSES
        TPU_WORKER_HOSTNAMES TPU_WORKER_ID TPU_CHIPS_PER_HOST_BOUNDS TPU_HOST_BOUNDS TPU_TOPOLOGY
        TPU_RUNTIME_METRICS_PORTS TPU_SKIP_MDS_QUERY TENSORBOARD_PROXY_URL UV_SYSTEM_PYTHON
    """,
    "Colab": """
        COLAB_RELEASE_TAG COLAB_BACKEND_VERSION COLAB_BACKEND_URL COLAB_CPU_COUNT COLAB_GPU
        COLAB_FILE_HANDLER_ADDR COLAB_JUPYTER_ALLOW_ORIGIN_PAT COLAB_JUPYTER_IP COLAB_JUPYTER_TOKEN
        COLAB_JUPYTER_TRANSPORT COLAB_KERNEL_MANAGER_PROXY_HOST COLAB_KERNEL_MANAGER_PROXY_PORT
        COLAB_LANGUAGE_SERVER_PROXY COLAB_LANGUAGE_SERVER_PROXY_LSP_DIRS COLAB_TPU_ADDR
        COLAB_LANGUAGE_SERVER_PROXY_REQUEST_TIMEOUT COLAB_LANGUAGE_SERVER_PROXY_ROOT_URL
        COLAB_NOTEBOOK_ID COLAB_SKU_TYPE COLAB_USE_TPU_LAUNCHER COLAB_WARMUP_DEFAULTS
        CLOUDSDK_CONFIG CLOUDSDK_PYTHON CUDNN_VERSION DATALAB_SETTINGS_OVERRIDES
        ENABLE_RUNTIME_UPTIME ENABLE_DIRECTORYPREFETCHER ENV FORCE_COLOR GCE_METADATA_TIMEOUT
        GCS_READ_CACHE_BLOCK_SIZE_MB GIT_PAGER GLIBCPP_FORCE_NEW GLIBCXX_FORCE_NEW HOSTNAME
        KMP_EXTRA_ARGS KMP_LISTEN_PORT KMP_TARGET_PORT LAST_FORCED_REBUILD LD_PRELOAD LIBRARY_PATH
        NCCL_VERSION NO_GCE_CHECK NV_CUDA_LIB_VERSION NV_CUDNN_PACKAGE NV_LIBNCCL_DEV_PACKAGE_NAME
        NVIDIA_PRODUCT_NAME NVIDIA_REQUIRE_CUDA PAGER PYDEVD_USE_FRAME_EVAL PYTHONPATH
        PYTHONWARNINGS PYTHONUTF8 PWD SHELL SHLVL TBE_CREDS_ADDR TBE_EPHEM_CREDS_ADDR
        TBE_RUNTIME_ADDR TCLLIBPATH TERM TF2_BEHAVIOR TF_FORCE_GPU_ALLOW_GROWTH TPU_NAME
        USE_AUTH_EPHEM VM_GCE_METADATA_HOST XRT_TPU_CONFIG MPLBACKEND NO_PROXY
    """,
}
CALLED = """
    LR=LEARNING_RATE num_generations=NUM_PRE_Q Steps=STEPS ROLLOUT_N=NUM_PRE_Q
    LOSS_BETA=BETA ENVIRONMENT_FACTORY=ENVIRONMENT_CLASS LORA_R=LORA_RANK LEARNRATE=LEARNING_RATE
    TRAIN_STEPS=STEPS TRAINING_STEPS=STEPS NUM_TRAIN_STEPS=STEPS TARGET_MODULES=LORA_TARGETS
    CHAT_TEMPLATE_PATH=CHAT_TEMPLATE LR_SCHEDULER=LR_SCHEDULE LR_WARMUP_STEPS_RATIO=WARMUP_RATIO
    KL_LOSS_TYPE=KL_ESTIMATOR ENTROPY_COEFF=ENTROPY_COEF REWARD_FUNC=REWARD_FN RESUME_MODE=RESUME
    USE_GRADIENT_CHECKPOINTING=REMAT MAX_ACTOR_CKPT_TO_KEEP=SAVE_KEEP
"""
REMOVED = """
    IMPORTANCE_SAMPLING_LEVEL=LOSS_TYPE=gspo REF_SYNC_STEPS=BETA REF_SYNC_ALPHA=BETA
    RESUME_FORCE=RESUME ACCURACY_OF=REWARD_FN ACCURACY_THRESHOLD=REWARD_FN
    PROMPT_TOO_LONG=MAX_PROMPT_LENGTH EXPORT_DTYPE=DTYPE SKIP_ZERO_ADVANTAGE=always
    DROP_ENDED=MAX_LENGTH_SAMPLE PACKING=TRAIN_MICRO_BATCH_SIZE LAYER_LOOP=config.yaml
    NONFINITE_LIMIT=3 REPETITION_NGRAM=repetition_penalty MAX_SEQ_LENGTH=MAX_LENGTH_SAMPLE
    LR_WARMUP_STEPS=WARMUP_RATIO NUM_EPOCHS=STEPS
"""
CALLED_IN_YAML = """
    rollout.n=rollout.num_pre_q model_path=model.path LR=train.learning_rate
    train.micro_batch_size_per_device=train.per_device_micro_batch_size
    optim.lr=train.learning_rate BATCH_SIZE=rollout.prompt_batch_size
"""


def pairs_of(text: str) -> list[list[str]]:
    return [pair.split("=", 1) for pair in text.split()]


def test_a_name_that_is_no_setting_is_a_mistake_that_says_what_to_use(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A typo of a setting, a name in another program, or a setting of an earlier version."""
    typos, removed = pairs_of(TYPOS), pairs_of(REMOVED)
    lines = {name: rf"unknown setting {name}; did you mean {ours}\?" for name, ours in typos}
    lines |= {name: f"{name} is called {ours} here " for name, ours in pairs_of(CALLED)}
    lines |= {name: f"there is no setting {name}: .*{words}" for name, words in removed}
    errors = error_lines(capsys, [], dict.fromkeys(lines, "1"))
    for name, error in zip(sorted(lines), errors, strict=True):
        assert re.match(f"error: {lines[name]}", error)

    lines = {key: f"{key} is called {ours} here " for key, ours in pairs_of(CALLED_IN_YAML)}
    keys = [(f"loss.{name.lower()}", words) for name, words in removed]
    lines |= {key: f"there is no setting {key}: .*{words}" for key, words in keys}
    file = write(tmp_path, "".join(f"{key}: 1\n" for key in lines))
    errors = error_lines(capsys, ["--config", str(file)], {})
    for line, error in zip(lines.values(), errors, strict=True):
        assert re.match(f"error: {file}: {line}", error)


def test_the_most_similar_name_of_an_ordinary_environment_stops_no_run() -> None:
    Config.from_env(dict.fromkeys(ORDINARY.split(), "x"))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_no_variable_of_an_ordinary_environment_stops_a_run_or_gets_a_line(name: str) -> None:
    given = dict.fromkeys(ENVIRONMENTS[name].split(), "1")
    assert config.load([], given)[2] == config.load([], {})[2]


def test_a_name_made_of_words_of_settings_or_one_letter_off_gets_a_line_without_its_value() -> None:
    for name in ("LEARNING_STEPS", "SAMPLE_TEMPERATURE", "EVAL_BATCH_SIZE", "MAX_EVAL_SAMPLES"):
        (line,) = config.load([], {name: "a secret"})[2][1:]
        reason = "no setting has this name (`python config.py` lists all)"
        assert line == f"note: {name} is ignored: {reason}"
    for name, meant in (("STEPZ", "STEPS"), ("RESUMO", "RESUME"), ("REMIT", "REMAT")):
        (line,) = config.load([], {name: "a secret"})[2][1:]
        assert line == f"note: {name} is ignored; did you mean {meant}?"
    ordinary = "PATH MODEL PRINT learning_steps MY_BATCH_SIZE WANDB_MODEL_NAME CTYPE TOP_N META"
    for name in ordinary.split():
        assert len(config.load([], {name: "1", "MODEL_PATH": "m", "BATCH_SIZE": "1"})[2]) == 1, name


# ---- Settings that stop a run, and those that get a line -----------------------------------------

MINE = "MODEL_PATH=m BATCH_SIZE=4"  # before the settings of a row; what stands in a row wins
# Settings -> how the line begins, with "..." before what it also contains.
MISTAKES = """
EVAL_FULL_SWEEP=maybe -> EVAL_FULL_SWEEP='maybe' is not a bool (0/1/true/false)
NUM_PRE_Q= -> NUM_PRE_Q='' is not a whole number
STEPS=1e3 -> STEPS='1e3' is not a whole number
NUM_PRE_Q=0 -> NUM_PRE_Q=0 must be at least 1
LEARNING_RATE=nan -> LEARNING_RATE='nan' is not finite
TEMPERATURE=0 -> TEMPERATURE=0.0 must be above 0
MAX_HOURS=-1 -> MAX_HOURS=-1.0 must be at least 0
REWARD_WEIGHTS=1,,1 -> REWARD_WEIGHTS='' is not a number
DTYPE=float16 -> DTYPE='float16' is not one of auto|bfloat16|float32
LOSS_TYPE=bnpo -> LOSS_TYPE='bnpo' is not one of ...|sft; bnpo is called dapo here
ROLLOUT_BACKEND=vanilla -> ROLLOUT_BACKEND='vanilla'...sglang_jax; vanilla is called naive here
MESH_SHAPE=2,4 -> MESH_SHAPE='2,4' does not have the right form: Training mesh: auto, or dp,fsdp,tp
MESH_SHAPE=-1,-1,1 -> MESH_SHAPE='-1,-1,1' does not have the right form
REPORT_TO=mlflow -> REPORT_TO='mlflow' does ...form: Trackers: any of wandb,trackio,tensorboard
REPORT_TO=wandb,none -> REPORT_TO='wandb,none' does not have the right form
REPORT_TO=wandb, -> REPORT_TO='wandb,' does not have the right form
NUM_PRE_Q=1 -> NUM_PRE_Q=1 makes every advantage of ADV_ESTIMATOR=grpo 0
ADV_ESTIMATOR=reinforce DYNAMIC_SAMPLING=1 -> DYNAMIC_SAMPLING=1 drops groups
TEACHER_PATH=t REWARD_COEF=0 DYNAMIC_SAMPLING=1 -> DYNAMIC_SAMPLING=1 drops groups that RE
TEACHER_PATH=t NUM_PRE_Q=1 -> NUM_PRE_Q=1 makes every advantage of ADV_ESTIMATOR=grpo 0
LOSS_TYPE=cispo -> EPS_HIGH=0.2 caps every ratio of LOSS_TYPE=cispo below 1; set EPS_HIGH=5
BETA=1 KL_ESTIMATOR=k1 KL_BIAS_CORRECTION=0 -> KL_ESTIMATOR=k1 has no gradient on average
IS_MODE=sequence_mask TOP_P=0.9 SAMPLING_SUPPORT=full -> IS_MODE=sequence_mask with SAMPLING_SUPP
LOSS_TYPE=dppo_tv IS_MODE=token_mask -> IS_MODE=token_mask corrects for the sampler, as LOSS_TYPE=dp
LOSS_TYPE=vespo IS_MODE=sequence_mask -> IS_MODE=sequence_mask weights sequences, and LOSS_TYPE=vesp
LOSS_TYPE=dppo_kl TOP_K=9 SAMPLING_SUPPORT=full -> LOSS_TYPE=dppo_kl would count TOP_K, TOP_P
OFF_POLICY_MASK_THRESHOLD=1 MIN_P=0.1 SAMPLING_SUPPORT=full -> OFF_POLICY_MASK_THRESHOLD=1.0 would
TOP_K=9 POLICY_LOSS_IMPL=pallas -> POLICY_LOSS_IMPL=pallas cannot restrict the softmax to the
TOP_K=9 ROLLOUT_BACKEND=sglang_jax STEPS=0 -> ROLLOUT_BACKEND=sglang_jax cannot restrict the softm
CHAT_TEMPLATE_KWARGS={'a':False} -> CHAT_TEMPLATE_KWARGS={'a':False} is no JSON object such as {"
CHAT_TEMPLATE_KWARGS=[1] -> CHAT_TEMPLATE_KWARGS=[1] is no JSON object such as {"enable_thinking": f
TEACHER_PATH=t DISTILL_COEF=0 REWARD_COEF=0 -> DISTILL_COEF=0 and REWARD_COEF=0 leave no trai
TEACHER_PATH=t OFF_POLICY_MASK_THRESHOLD=0.5 -> OFF_POLICY_MASK_THRESHOLD=0.5 needs one advantage
DELTA=1.5 EPS_HIGH=0.5 -> DELTA=1.5 must be above 1 + EPS_HIGH = 1.5
TOP_K=129 SAMPLING_SUPPORT=full STEPS=0 -> TOP_K=129 must be at most 128
OVERLONG_CACHE=1025 -> OVERLONG_CACHE=1025 must be at most MAX_LENGTH_SAMPLE=1024
OUTPUT_DIR=gs://b/run -> OUTPUT_DIR and EXPORT_HF are folders of this machine
MAX_HOURS=9 SAVE_EVERY_STEPS=0 -> MAX_HOURS=9 ends a start, and SAVE_EVERY_STEPS=0 saves nothing
PUSH_TO_HUB=model -> PUSH_TO_HUB='model' does not have the right form: Hub repository owner
PUSH_TO_HUB=me/my/model -> PUSH_TO_HUB='me/my/model' does not have the right form
PUSH_TO_HUB=me/é? -> PUSH_TO_HUB='me/é?' does not have the right form
PUSH_TO_HUB=me/model EXPORT_HF=none -> PUSH_TO_HUB=me/model has nothing to upload with EXPORT_HF=n
PUSH_TO_HUB=me/model STEPS=0 -> PUSH_TO_HUB=me/model has nothing to upload with EXPORT_HF=none or S
MODEL_PATH=me/a PUSH_TO_HUB=me/a -> PUSH_TO_HUB=me/a is MODEL_PATH; the model would be overwritten
LORA_BASE_DTYPE=int8 ROLLOUT_BACKEND=sglang_jax -> LORA_BASE_DTYPE=int8 has no float weights to
MAX_TURNS=2 -> MAX_TURNS=2 needs an ENVIRONMENT_CLASS
REPORT_TO=trackio,wandb WANDB_MODE=disabled -> REPORT_TO=trackio,wandb needs W&B, and WANDB_MODE=
ENVIRONMENT_CLASS=a.py:A ROLLOUT_BACKEND=sglang_jax -> ROLLOUT_BACKEND=sglang_jax samples comple
REWARD_FN=exact_match,reward_model -> REWARD_FN=exact_match,reward_model: reward_model needs REW
REWARD_FN=reward_model,exact_match REWARD_MODEL_PATH=r -> REWARD_FN=reward_model,exact_match: eval
REWARD_FN=reward_model REWARD_MODEL_PATH=r EVAL_EVERY_STEPS=0 EVAL_FULL_SWEEP=1 -> REWARD_FN=reward_
REWARD_FN=exact_match,reward_model REWARD_MODEL_PATH=r ENVIRONMENT_CLASS=a.py:A -> REWARD_FN=exact_m
JUDGE_TEMPLATE_KWARGS=[1] -> JUDGE_TEMPLATE_KWARGS=[1] is no JSON object such as {"enable_thinking"
JUDGE_WORDS=Yes -> JUDGE_WORDS='Yes' does not have the right form
"""
TASK = "reasoning_gym:gcd?max_value=9&value_type=[a]"
MISTAKES += f"""DATASET={TASK} -> DATASET={TASK}: write these questions to a folder; run \
python recipes/gym.py gcd runs/gcd max_value=9 'value_type=[a]'
"""
# Settings, of which empty ones are left out -> the note about what may not be meant, if any.
NOTES = """
MODEL_PATH= DATASET=a.jsonl -> MODEL_PATH is not set, so DATASET=a.jsonl trains this project's tiny
BATCH_SIZE=0 -> a step has 2 prompts for each device; ROLLOUT_GLOBAL_BATCH_SIZE sets
LR_DECAY_STEPS=100 STEPS=200 -> LR_DECAY_STEPS=100 is less than STEPS=200
TOP_K=9 SAMPLING_SUPPORT=full -> TOP_K, TOP_P, MIN_P change sampling only, and the loss has a bias
MODEL_PATH= MODEL=org/name -> MODEL=org/name is ignored; the setting is called MODEL_PATH
MAX_TOKENS=512 -> MAX_TOKENS=512 is ignored; the setting is called MAX_LENGTH_SAMPLE
EPS_HIGH=0.28 -> EPS_HIGH=0.28 does nothing with one update per step
NUM_MINI_BATCHES=2 LOSS_TYPE=gspo -> LOSS_TYPE=gspo was published with EPS_LOW=0.0003 EPS_HIGH=0.00
TEACHER_PATH=t REWARD_COEF=0 ADV_ESTIMATOR=rloo -> ADV_ESTIMATOR=rloo does nothing with REWARD_
NUM_MINI_BATCHES=2 LOSS_TYPE=gmpo EPS_LOW=0.4 -> LOSS_TYPE=gmpo was published with EPS_LOW=0.4 EPS_
LOSS_TYPE=dppo_tv -> LOSS_TYPE=dppo_tv drops no token with one update per step, and is then dapo
NUM_MINI_BATCHES=2 LOSS_TYPE=gmpo EPS_LOW=0.4 EPS_HIGH=0.4 DELTA=3 -> DELTA=3.0 does nothing with LO
NUM_MINI_BATCHES=2 LOSS_TYPE=vespo EPS_HIGH=0.3 -> EPS_HIGH=0.3 does nothing with LOSS_TYPE=vespo
LOSS_TYPE=sapo EPS_LOW=0.1 -> EPS_LOW=0.1 does nothing with LOSS_TYPE=sapo
OFF_POLICY_MASK_THRESHOLD=0.5 -> OFF_POLICY_MASK_THRESHOLD=0.5 does nothing with one update per step
OVERLONG_CACHE=3 -> OVERLONG_CACHE=3 does nothing with REWARD_FN=
ENVIRONMENT_CLASS=a.py:A REWARD_FN=soft_overlong_penalty -> soft_overlong_penalty counts only the p
REWARD_FN=a.py:f ANSWER_TAGS=a,b -> ANSWER_TAGS=a,b: the prompt asks for
SYSTEM_PROMPT=p REWARD_FN=a.py:f ANSWER_TAGS=a,b -> ANSWER_TAGS=a,b does
SGLANG_JAX_DTYPE=float32 -> SGLANG_JAX_DTYPE=float32 does nothing with
REPORT_TO=trackio WANDB_MODE=offline -> WANDB_MODE=offline does nothing
LORA_ALPHA=8 -> LORA_ALPHA=8.0 does nothing with LORA_RANK=0
DISTILL_COEF=2 -> DISTILL_COEF=2.0 does nothing with TEACHER_PATH=
REWARD_COEF=0 -> REWARD_COEF=0.0 does nothing with TEACHER_PATH=
PUSH_TO_HUB_PRIVATE=0 -> PUSH_TO_HUB_PRIVATE=false does nothing with PUSH
CHECKPOINT_DIR=gs://a/b SAVE_EVERY_STEPS=0 -> CHECKPOINT_DIR=gs://a/b gets no checkpoint with SAVE_
STEPS=0 MAX_HOURS=9 SAVE_EVERY_STEPS=0 -> MAX_HOURS=9.0 does nothing with STEPS=0
REWARD_MODEL_PATH=r -> REWARD_MODEL_PATH=r does nothing with REWARD_FN=
JUDGE_PROMPT=p.txt -> JUDGE_PROMPT=p.txt does nothing with REWARD_MODEL
JUDGE_WORDS=A,B -> JUDGE_WORDS=A,B does nothing with REWARD_MODEL_PATH=
JUDGE_TEMPLATE_KWARGS={} -> JUDGE_TEMPLATE_KWARGS="{}" does nothing with
CHECKPOINT_DIR=gs://a/b SAVE_EVERY_STEPS=1
SAVE_EVERY_STEPS=0
BATCH_SIZE=0 STEPS=0
LR_DECAY_STEPS=100 STEPS=200 LR_SCHEDULE=constant
MODEL=org/name
EPS_LOW=0.1 NUM_MINI_BATCHES=2
SYSTEM_PROMPT=p ANSWER_TAGS=a,b REWARD_FN=a.py:f,exact_match
ANSWER_TAGS=a,answer REWARD_FN=a.py:f
JUDGE_URL=u JUDGE_MODEL=j JUDGE_API_KEY=k JUDGE_CONCURRENCY=3
NUM_PRE_Q=1 ADV_ESTIMATOR=reinforce
NUM_PRE_Q=1 TEACHER_PATH=t REWARD_COEF=0 DISTILL_COEF=0.5
TEACHER_PATH=t DYNAMIC_SAMPLING=1
LOSS_TYPE=cispo EPS_HIGH=1
DELTA=1.5 EPS_HIGH=0.49 OFF_POLICY_MASK_THRESHOLD=0.5 PPO_EPOCHS=2
LOSS_TYPE=dppo_tv DELTA=1.1 EPS_LOW=.1 EPS_HIGH=.1 PPO_EPOCHS=2 TOP_P=.9 OFF_POLICY_MASK_THRESHOLD=1
REWARD_FN=soft_overlong_penalty OVERLONG_CACHE=1024
BETA=1 KL_ESTIMATOR=k1
TOP_K=9 SAMPLING_SUPPORT=full IS_MODE=sequence_mask ROLLOUT_BACKEND=sglang_jax
IS_MODE=token_mask IS_FLOOR=0.5 IS_CAP=2 TOP_P=0.9
LOSS_TYPE=vespo IS_MODE=token_mask TOP_P=0.9 SAMPLING_SUPPORT=full
LOSS_TYPE=dppo_tv EPS_LOW=.1 EPS_HIGH=.1 TOP_P=.9 SAMPLING_SUPPORT=full ROLLOUT_BACKEND=sglang_jax
REPORT_TO=tensorboard,trackio WANDB_MODE=disabled -> WANDB_MODE=disabled does nothing with RE
REPORT_TO=trackio,tensorboard,wandb WANDB_MODE=offline
REWARD_FN=exact_match,reward_model REWARD_MODEL_PATH=r
REWARD_FN=reward_model,exact_match REWARD_MODEL_PATH=r EVAL_EVERY_STEPS=0
REWARD_FN=my.py:reward_model
"""


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines())
def test_a_bad_value_or_settings_that_contradict_each_other_are_one_line_that_names_them(
    row: str, capsys: pytest.CaptureFixture
) -> None:
    settings, words = row.split(" -> ")
    begins, _, contains = words.partition("...")
    (line,) = error_lines(capsys, [], env(f"{MINE} {settings}"))
    assert line.startswith(f"error: {begins}") and contains in line


@pytest.mark.parametrize("row", NOTES.strip().splitlines())
def test_a_line_says_what_may_not_be_meant_and_is_not_printed_without_need(row: str) -> None:
    settings, _, words = row.partition(" -> ")
    given = {name: value for name, value in env(f"{MINE} {settings}").items() if value}
    notes = config.load([], given)[2][1:]
    assert [note.startswith(f"note: {words}") for note in notes] == [True] * bool(words)


def test_a_command_that_has_no_steps_says_that_max_hours_does_nothing() -> None:
    line = "note: MAX_HOURS=9 does nothing with --ask, --probe and --eval-only"
    assert config.load(["--ask", "1?"], {"MAX_HOURS": "9"})[2][1:] == [line]
    assert config.load(["--probe", "9"], {"MAX_HOURS": "9"})[2][1] == line


# ---- All at once ---------------------------------------------------------------------------------


def test_all_mistakes_of_a_start_are_told_at_once(tmp_path: Path, capsys) -> None:
    file = write(tmp_path, "rollout: {n: 4, temperature: 0}\nloss.delta: 1.1\n")
    given = env("LR=1 LERNING_RATE=1 NUM_PRE_Q=eight NUM_EPOCHS=3 STEPS=5 TOP_K=200")
    lines = error_lines(capsys, ["--config", str(file)], given)
    for line, words in zip(
        lines,
        [
            "error: unknown setting LERNING_RATE; did you mean LEARNING_RATE?",
            "error: LR is called LEARNING_RATE here",
            "error: there is no setting NUM_EPOCHS: STEPS is the number of steps",
            "error: NUM_PRE_Q='eight' is not a whole number",
            "error: TOP_K=200 must be at most 128",
            f"error: {file}: rollout.n is called rollout.num_pre_q here",
            f"error: {file}: rollout.temperature=0.0 must be above 0",
            "error: DELTA=1.1 must be above 1 + EPS_HIGH = 1.2",
        ],
        strict=True,
    ):
        assert line.startswith(words)


# ---- YAML ----------------------------------------------------------------------------------------

WRITTEN = """
    model: {path: m, model_revision: 0123e4}
    data: {dataset_config: null, train_split: "007", system_prompt: }
    reward.reward_weights: [1, 0.5, 0]
    eval: {eval_prompts: null, eval_samples: , eval_temperature: }
    train: {learning_rate: 1e-6, mesh_shape: [1, -1, 1]}
    eval.eval_full_sweep: true  # sweep
    loss.adv_estimator: reinforce++
    rollout:  # nothing yet
    derived: {local_batch: nonsense}
    derived.micro_batch_size: [nonsense]
"""
BAD_YAML = [
    ("rollout: {promt_batch_size: 4}", ": unknown setting rollout.promt_batch_size; did you mean"),
    ("trainer.project_name: x", ": unknown setting trainer.project_name "),
    ("train.steps: true", ": train.steps='true' is not a whole number"),
    ("eval.eval_full_sweep: yes", ": eval.eval_full_sweep='yes' is not a bool"),
    ("train: {steps: {of: 3}}", ": train.steps must be one value, or a list of values"),
    ("reward.reward_weights: [[1], 2]", ": reward.reward_weights must be one value, or a list"),
    (
        "train: {steps: 5}\ntrain: {clip_norm: 2}",
        ": the key train stands there more than once; keep one",
    ),
    ("train: {steps: 5, steps: 6}", ": the key steps stands there more than once; keep one"),
    ("train.steps: 5\ntrain: {steps: 5}", ": train.steps is set twice; keep one"),
    ("- train.steps: 1", " does not hold `group.name: value` lines"),
    ("STEPS=1", " does not hold `group.name: value` lines"),
    *((text, " cannot be read: ") for text in ("a: [1", "a: b: c", "\tx: 1", "a: 1\n---\nb: 2")),
]


def test_nested_and_dotted_yaml_is_taken_as_written(tmp_path: Path) -> None:
    file = write(tmp_path, WRITTEN)
    cfg = Config.from_env({}, file)
    assert (cfg.model_revision, cfg.dataset_config, cfg.system_prompt) == ("0123e4", "", "")
    assert (cfg.train_split, cfg.eval_full_sweep, cfg.learning_rate) == ("007", True, 1e-6)
    assert (cfg.reward_weights, cfg.mesh_shape) == ((1.0, 0.5, 0.0), "1,-1,1")
    assert cfg.adv_estimator == "reinforce++"
    assert (cfg.eval_prompts, cfg.eval_samples, cfg.eval_temperature) == (128, 1, 0.0)
    file.write_text(WRITTEN, encoding="utf-16")  # as PowerShell writes it
    assert Config.from_env({}, file) == cfg
    assert Config.from_env({}, write(tmp_path, "# nothing\n")) == Config.from_env({})


@pytest.mark.parametrize(("text", "words"), BAD_YAML)
def test_a_bad_file_stops_the_run_with_one_line_that_names_it(text, words, tmp_path, capsys):
    file = write(tmp_path, text)
    (line,) = error_lines(capsys, ["--config", str(file)], {})
    assert line.startswith(f"error: {file}{words}")
    (line,) = error_lines(capsys, ["--config", "no.yaml"], {})
    assert line.startswith("error: no.yaml cannot be read: ")


# ---- Print ---------------------------------------------------------------------------------------

# Without quotes YAML reads these as numbers, dates, null or no text at all, or raises an error.
NO_TEXTS = """
    yes ~ 0x_ 0123 1_000 1e-6 .nan 12:30:45 2026-02-28 2026-02-30 = - # * @ [a] a: a\\b it's a"b ""
    --- C:\\x é 🙂 1,8,1
""".split()
SPACED = ["", " x", "a: b", "x # y", "1\n  2:\n\n", "a\tb", "a\r\nb"]
SPACED += ["x " * 300, "9" * 5000, "\x85", "\x07", "\u2028", "\ufeff"]


@pytest.mark.parametrize("text", NO_TEXTS + SPACED)
def test_what_is_printed_reads_back_to_the_same_settings(tmp_path: Path, text: str) -> None:
    others = {"learning_rate": 1.2345678901234567e-07, "reward_weights": (0.1, 3e22, -1.0)}
    cfg = Config(model_path="m", wandb_name=text, system_prompt=text, top_k=3, **others)
    printed = config.describe(cfg, 2, 4)
    assert printed.isascii() and printed.count("\n") == len(FIELDS) + 8
    (tmp_path / "config.yaml").write_text(printed + "\n")
    assert Config.from_env({}, tmp_path / "config.yaml") == cfg
    settings = read_settings(tmp_path)
    assert (settings["run.wandb_name"], settings["data.system_prompt"]) == (text, text)


def test_print_has_one_line_per_setting_with_its_name_help_and_default() -> None:
    printed = config.describe(Config(model_path="m", num_pre_q=4), 2, 4)
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    help = Config.__dataclass_fields__["dtype"].metadata["help"]
    assert f"model.dtype: auto # DTYPE: {help} (auto|bfloat16|float32) [default]" in lines
    assert any(line.startswith("rollout.num_pre_q: 4 # NUM_PRE_Q: ") for line in lines)
    assert sum("[changed from 8, fixed on resume]" in line for line in lines) == 1
    assert "\neval.eval_full_sweep: false " in printed
    assert "".join(lines[-8:]).replace("derived.", " ").replace(": ", "=") == (
        " local_batch=32 global_batch=64 prompt_batch_size=8 passes_per_step=1"
        " micro_batch_size=16 grad_accum_steps=2 prompts_per_step=16 updates_per_step=1"
    )


def test_printing_imports_neither_jax_nor_flax() -> None:
    code = "import sys, config; config.describe(config.Config()); print(*sys.modules)"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=REPO, text=True)
    modules = set(printed.split())
    assert {"config", "yaml", "infra.sizes"} <= modules
    assert not {"jax", "jaxlib", "flax", "optax", "numpy", "transformers", "datasets"} & modules


FIXED_ON_RESUME = """
    ADV_ESTIMATOR BETA CLIP_NORM DELTA DYNAMIC_SAMPLING DYNAMIC_SAMPLING_MAX_ROUNDS ENTROPY_COEF
    ENVIRONMENT_CLASS EPS_HIGH EPS_LOW IS_CAP IS_FLOOR IS_MODE KL_BIAS_CORRECTION KL_ESTIMATOR
    LEARNING_RATE LORA_ALPHA LORA_RANK LORA_TARGETS LOSS_TYPE LR_SCHEDULE MASK_TRUNCATED_COMPLETIONS
    MAX_LENGTH_SAMPLE MAX_TURNS MIN_P NUM_MINI_BATCHES NUM_PRE_Q OPTIMIZER OVERLONG_CACHE PPO_EPOCHS
    REWARD_FN REWARD_WEIGHTS ROLLOUT_BACKEND SAMPLING_SUPPORT SCALE_REWARDS SEED SGLANG_JAX_DTYPE
    TEMPERATURE TOP_ENTROPY_QUANTILE TOP_K TOP_P WARMUP_RATIO WEIGHT_DECAY
"""


def test_a_resumed_run_must_keep_the_settings_that_change_results() -> None:
    lines = config.describe(Config(model_path="m")).splitlines()
    fixed = [line for line in lines if line.endswith(", fixed on resume]")]
    fixed = {re.search("# ([A-Z_]+): ", line)[1] for line in fixed}
    assert {*FIXED_ON_RESUME.split()} <= fixed
    others = "STEPS BATCH_SIZE TRAIN_MICRO_BATCH_SIZE MESH_SHAPE REMAT DTYPE EVAL_PROMPTS SAVE_KEEP"
    assert not {*others.split()} & fixed


@pytest.mark.style
def test_every_help_text_is_short_and_ends_like_a_sentence() -> None:
    for field in FIELDS:
        help = field.metadata["help"]
        assert help[0].isupper() and help.endswith(".") and len(help) <= 90, field.name


# ---- .env ----------------------------------------------------------------------------------------

DOTENV = """
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
    for text in (DOTENV, DOTENV.replace("\n", "\r\n"), "\ufeff" + DOTENV):
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
    for line in ("my secret key", "my-name=secret", "=secret", "\xe9=secret"):
        file.write_text(f"A=1\n{line}", encoding="utf-8")
        with pytest.raises(UserMistake, match=r"\.env: line 2 is not NAME=value$") as error:
            read_dotenv(file)
        assert "secret" not in str(error.value)
    file.write_bytes("A=Zo\xeb".encode("latin-1"))
    with pytest.raises(UserMistake, match=r"\.env cannot be read: UnicodeDecodeError: "):
        read_dotenv(file)


# ---- The command line ----------------------------------------------------------------------------

COMMANDS = [
    (["STEPS=1"], "unrecognized arguments: STEPS=1"),
    (["--plan", "v6e-8", "--print-config"], "not allowed with argument --plan"),
    (["--processes", "4"], "only for --print-config"),
    (["--mean-completion", "300"], "only for --plan"),
    (["--plan", "v6e-8", "--price-per-chip-hour", "0"], "are above 0"),
    (["--ask", " "], "--ask needs a question"),
    (["--answer", "5"], "--answer is only for --ask"),
    (["--probe", "0"], "--probe needs at least 1 question"),
    (["--out", "folder"], "--out and --time are only for --probe"),
    (["--probe", "9", "--eval-only"], "not allowed with argument --probe"),
    (["--ask", "How many?", "--answer", "--eval-only"], "argument --answer: expected one argument"),
]


@pytest.mark.parametrize(("argv", "words"), COMMANDS)
def test_a_wrong_command_ends_with_2_and_says_why(argv: list[str], words: str, capsys) -> None:
    usage, line = error_lines(capsys, argv, {})
    assert words in line and usage.startswith("usage: STEPS=1 python ")


def test_negative_numbers_and_texts_with_spaces_are_answers() -> None:
    for answer in (["--answer", "-0.5"], ["--answer", "-1 and 1/2"], ["--answer=-1/2"]):
        args = settings.parse_command_line(["--ask", "-5 + 3 = ?", *answer])
        assert (args.ask, args.answer) == ("-5 + 3 = ?", answer[-1].removeprefix("--answer="))


def test_ctrl_c_during_the_imports_of_a_run_ends_it_without_a_traceback(tmp_path: Path) -> None:
    """Here the import of jax is the place. Callbacks that jax installs would drop an exception."""
    (tmp_path / "jax.py").write_text("import os; os.kill(os.getpid(), 2); print('goes on')")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, REPO / "train_grpo.py"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")
