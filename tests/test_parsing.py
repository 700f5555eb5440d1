"""parsing.py: misspelt names, .env files, no pyyaml. test_config.py has values and YAML."""

import subprocess
import sys
from pathlib import Path

import pytest

import config
from config import Config
from parsing import REPO, read_dotenv

# ---- Names ---------------------------------------------------------------------------------------

TYPOS = """
    LEARNING_RATES=LEARNING_RATE BATCHSIZE=BATCH_SIZE BACTH_SIZE=BATCH_SIZE NUM_PREQ=NUM_PRE_Q
    TOPK=TOP_K STEP=STEPS SEEDS=SEED MODEL_PTH=MODEL_PATH OPTIMISER=OPTIMIZER Steps=STEPS
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
    WANDB_PROJCT SGLANG_PORT PYTHONPATH VIRTUAL_ENV OMP_NUM_THREADS RANK MASTER_ADDR WORLD_SIZE LR
    BATCH BATCH_SIZES_DIR MY_BATCH_SIZE BATCH_SIZE_2 EVAL_BATCH_SIZE TRAIN_BATCH_SIZE SEED_FILE ETA
    DATASET_DIR DATASET_NAME OUTPUT OUTPUT_PATH TRAIN_STEPS BETA_DIR META TYPE STEMS TOPS MESH
    TPU_NAME TPU_TYPE ZONE PROJECT WORKER REF REPO_URL SSH_TIMEOUT_S PYTHON
"""


@pytest.mark.parametrize(("name", "meant"), [pair.split("=") for pair in TYPOS.split()])
def test_a_name_within_a_typo_of_a_setting_is_an_error(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown setting {name}; did you mean {meant}\\?"):
        Config.from_env({name: "1"})


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
    for text in ("A=1\nmy secret key", "A=1\nmy-name=secret", "A=1\n=secret", "A=1\n\xe9=secret"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"\.env: line 2 is not NAME=value$") as error:
            read_dotenv(file)
        assert "secret" not in str(error.value)
    file.write_bytes(b"A=\xff")
    with pytest.raises(ValueError, match="cannot be read: UnicodeDecodeError"):
        read_dotenv(file)


def test_a_dotenv_file_beside_the_code_lies_below_the_environment(tmp_path, monkeypatch) -> None:
    (tmp_path / ".env").write_text("STEPS=7\nNUM_PRE_Q=4\nA_KEY=secret\n")
    monkeypatch.setattr(config, "REPO", tmp_path)
    monkeypatch.setattr(config.os, "environ", {"NUM_PRE_Q": "2"})
    cfg, _ = config.load([])
    assert (cfg.steps, cfg.num_pre_q) == (7, 2)
    assert config.os.environ == {"NUM_PRE_Q": "2", "STEPS": "7", "A_KEY": "secret"}
    assert "secret" not in config.describe(cfg)


# ---- pyyaml --------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["config", "train_grpo"])
def test_without_pyyaml_the_line_says_how_to_get_it(module: str) -> None:
    code = f"import runpy, sys; sys.modules['yaml'] = None; sys.argv = ['{module}.py']; "
    code += f"runpy.run_path('{module}.py', run_name='__main__')"  # as if it were not installed
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "error: settings are read and printed as YAML, for which pyyaml is not installed: "
        "pip install -r requirements.txt\n"
    )
