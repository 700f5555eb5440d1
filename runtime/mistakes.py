"""The mistakes of a user: what ends a program with one line each, and names that are no settings.

Imports neither jax nor flax.
"""

import difflib
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple, NoReturn

LIST_ALL = "(`python config.py` lists all)"


class Mistake(NamedTuple):
    """What is wrong, as a line of text, and the environment name of the setting."""

    setting: str
    text: str


class UserMistake(ValueError):
    """A mistake in what the user has given: a line of text for each, which names what to change.

    It ends the program without a traceback; see `fail`. All other errors keep their traceback.
    """


class Unwritable(Exception):
    """A file of the run or a checkpoint cannot be written: a line of text that says why.

    It ends the run with exit code 1. The same command goes on from the newest complete checkpoint.
    """


def fail(error: UserMistake | Unwritable) -> NoReturn:
    """Ends the program after mistakes of the user: a line for each mistake, and exit code 2."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    raise SystemExit(2)


def in_one_line(error: BaseException, *, with_type: bool = True) -> str:
    """The type and the message of an error, without line breaks; at most 500 characters.

    with_type: False leaves out the type of an error that has a message.
    """
    kind, message = type(error).__name__, " ".join(str(error).split())
    return (f"{kind}: {message}" if with_type else message or kind)[:500]


# ---- Names of other programs ---------------------------------------------------------------------

# Names that other programs use for our settings. A name in lower case occurs only in YAML.
_NAMES_ELSEWHERE = {
    "MODEL_PATH": "MODEL_NAME_OR_PATH MODEL_ID",
    "SEED": "RANDOM_SEED",
    "ROLLOUT_BACKEND": "ROLLOUT_ENGINE",
    "BATCH_SIZE": "ROLLOUT_PROMPT_BATCH_SIZE",
    "NUM_PRE_Q": "NUM_GENERATIONS GROUP_SIZE ROLLOUT_N rollout.n",
    "MAX_LENGTH_SAMPLE": "MAX_NEW_TOKENS MAX_COMPLETION_LENGTH MAX_RESPONSE_LENGTH MAX_LEN_SAMPLE",
    "REWARD_FN": "REWARD_FUNCS",
    "STEPS": "MAX_STEPS NUM_STEPS TOTAL_STEPS TOTAL_TRAINING_STEPS",
    "TRAIN_MICRO_BATCH_SIZE": "MICRO_BATCH_SIZE MICRO_BATCH",
    "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE": "PER_DEVICE_TRAIN_BATCH_SIZE MICRO_BATCH_SIZE_PER_DEVICE "
    "PPO_MICRO_BATCH_SIZE_PER_GPU",
    "GRAD_ACCUM_STEPS": "GRADIENT_ACCUMULATION_STEPS GRAD_ACCUM",
    "PPO_EPOCHS": "NUM_ITERATIONS",
    "OPTIMIZER": "OPTIM",
    "LEARNING_RATE": "LR",
    "LR_SCHEDULE": "LR_SCHEDULER_TYPE",
    "CLIP_NORM": "MAX_GRAD_NORM GRAD_CLIP",
    "MESH_SHAPE": "MESH_SHAPE_FSDP",
    "REMAT": "GRADIENT_CHECKPOINTING",
    "EPS_LOW": "EPSILON EPSILON_LOW CLIP_RATIO_LOW CLIP_RATIO CLIP_EPS",
    "EPS_HIGH": "EPSILON_HIGH CLIP_RATIO_HIGH",
    "DELTA": "CLIP_RATIO_C",
    "BETA": "KL_COEF KL_LOSS_COEF KL_BETA",
    "REF_SYNC_STEPS": "REF_MODEL_SYNC_STEPS",
    "REF_SYNC_ALPHA": "REF_MODEL_MIXUP_ALPHA",
    "IS_MODE": "VLLM_IMPORTANCE_SAMPLING_MODE",
    "IS_CAP": "VLLM_IMPORTANCE_SAMPLING_CAP VLLM_IMPORTANCE_SAMPLING_CLIP_MAX",
    "EVAL_EVERY_STEPS": "EVAL_STEPS TEST_FREQ EVAL_EVERY",
    "EVAL_SAMPLES": "NUM_GENERATIONS_EVAL",
    "SAVE_EVERY_STEPS": "SAVE_STEPS SAVE_FREQ",
    "SAVE_KEEP": "SAVE_TOTAL_LIMIT",
    "RESUME": "RESUME_FROM_CHECKPOINT",
    "ROLLOUT_BATCH_SIZE": "GENERATION_BATCH_SIZE",
}
# What other programs call our values of a setting.
VALUES_ELSEWHERE = {
    "ROLLOUT_BACKEND": {"vanilla": "naive"},
    "LOSS_TYPE": {
        "bnpo": "dapo",
        "token-mean": "dapo",
        "seq-mean-token-mean": "grpo",
        "sequence-mean-token-mean": "grpo",
    },
    "KL_ESTIMATOR": {"kl": "k1", "mse": "k2", "mse_kl": "k2", "low_var_kl": "k3"},
    "LR_SCHEDULE": {"cosine": "warmup_cosine", "constant_with_warmup": "constant"},
}
OTHER_NAMES = {other: ours for ours, others in _NAMES_ELSEWHERE.items() for other in others.split()}
# Settings of other programs that have no counterpart here, and what to use instead.
NOT_SETTINGS = {
    "PARAM_DTYPE": "trained weights are float32, since bfloat16 loses most updates of them; to "
    "save memory lower TRAIN_PER_DEVICE_MICRO_BATCH_SIZE or use more devices",
    "NUM_EPOCHS": "a run takes STEPS steps; an epoch has as many steps as the dataset has "
    "examples, divided by the prompts of a step",
    "EVAL_BATCHES": "EVAL_PROMPTS is the number of questions in an evaluation",
    "MAX_LENGTH_TOTAL": "a sequence is as long as its prompt and MAX_LENGTH_SAMPLE new tokens "
    "need; MAX_PROMPT_LENGTH limits the prompt",
    "LOG_COMPLETIONS": "every SAMPLE_EVERY_STEPS steps a run shows a group of completions",
    "USE_VLLM": "ROLLOUT_BACKEND names the program that samples",
    "WARMUP_STEPS": "WARMUP_RATIO is the fraction of the schedule that is warmup",
    "STEPS_PER_GENERATION": "NUM_MINI_BATCHES is the number of mini-batches, and so of updates, "
    "into which a step's groups are divided",
    "PPO_MINI_BATCH_SIZE": "NUM_MINI_BATCHES is the number of mini-batches of a step; each has "
    "the step's prompts divided by this number",
}
NOT_SETTINGS |= dict.fromkeys(
    ("EPOCHS", "NUM_TRAIN_EPOCHS", "TOTAL_EPOCHS"), NOT_SETTINGS["NUM_EPOCHS"]
)
NOT_SETTINGS["MAX_LENGTH"] = NOT_SETTINGS["MAX_LENGTH_TOTAL"]
# Names like those of settings that an environment may have for other purposes: they stop no run.
AMBIGUOUS = {"MODEL": "MODEL_PATH", "MODEL_NAME": "MODEL_PATH", "DATASET_NAME": "DATASET"}
AMBIGUOUS |= {"TRAIN_BATCH_SIZE": "ROLLOUT_GLOBAL_BATCH_SIZE", "RUN_NAME": "WANDB_NAME"}
# Names with these beginnings are hardly meant for another program. TRAIN_STEPS may be.
OUR_GROUPS = ("ROLLOUT_", "LOSS_")
# Environment names that start like this are never read as misspelt settings.
FOREIGN = ("WANDB_", "JAX_", "HF_", "TPU_", "XLA_", "SGLANG_")


def other_name(
    key: str, names: Iterable[str], spelling: Mapping[str, str], place: str = ""
) -> Mistake | None:
    """The mistake of using a name that is not the setting's name here; None for other names.

    key: the name as the user wrote it. names: the forms of `key` to look up. spelling: environment
    name -> the name that the setting has in this place. place: the start of the text.
    """
    for name in names:
        if name in NOT_SETTINGS:
            return Mistake(name, f"{place}there is no setting {key}: {NOT_SETTINGS[name]}")
        ours = OTHER_NAMES.get(name, name)
        if ours in spelling:
            return Mistake(ours, f"{place}{key} is called {spelling[ours]} here {LIST_ALL}")
    return None


def ignored_names(env: Mapping[str, str]) -> list[str]:
    """A line for each ambiguous name in the environment. A name gets no line if the environment has
    its setting too."""
    found = [(name, ours) for name, ours in AMBIGUOUS.items() if name in env and ours not in env]
    return [f"{name}={env[name]} is ignored; the setting is called {ours}" for name, ours in found]


def misspelt(name: str, known: list[str]) -> str:
    """The known name of which an environment variable is a misspelling, or an empty text."""
    # SED is a tool, not a typo of SEED, and TYPE is not a typo of DTYPE.
    if name.startswith(FOREIGN) or len(name) <= 3 or name == "TYPE":
        return ""
    name = name.upper()
    close = difflib.get_close_matches(name, known, cutoff=0.85)
    similar = [meant for meant in close if is_misspelt(name, meant)]
    # The same letters in another order, such as STESP, are less alike than difflib asks for.
    similar += [meant for meant in known if sorted(meant) == sorted(name)]
    return similar[0] if similar else ""


def is_misspelt(name: str, meant: str) -> bool:
    """True if the words that two similar names do not share are similar too, or only left out.

    LERNING_RATE and BATCHSIZE are misspelt; MODULE_PATH and MY_BATCH_SIZE are other names.
    """
    words, meant_words = name.split("_"), meant.split("_")
    extra = "".join(word for word in words if word not in meant_words)
    missing = "".join(word for word in meant_words if word not in words)
    return not extra or difflib.SequenceMatcher(None, extra, missing).ratio() >= 0.75
