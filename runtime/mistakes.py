"""The mistakes of a user: what ends a program with one line each, and names that are no settings.

Imports neither jax nor flax.
"""

import difflib
import sys
from collections.abc import Mapping, Sequence
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


# ---- Names that are no settings ------------------------------------------------------------------

_EPOCHS = "STEPS is the number of steps; an epoch has as many as the dataset has questions, "
_EPOCHS += "divided by the prompts of a step"
_ALWAYS = "it is always on where MAX_LENGTH_SAMPLE >= 128"
_ACCURACY = "accuracy is the share of rewards of at least 1 by the first function of REWARD_FN, "
_ACCURACY += "which may have weight 0"
_REFERENCE = "the reference is the model with which a run begins; a new run with MODEL_PATH=RUN/hf "
_REFERENCE += "begins with the trained one"
# Names of other programs, and of older versions of this one, that have no counterpart.
NOT_SETTINGS = {
    "PARAM_DTYPE": "trained weights are float32, since bfloat16 loses most updates of them; to "
    "save memory lower TRAIN_PER_DEVICE_MICRO_BATCH_SIZE or use more devices",
    **dict.fromkeys(("NUM_EPOCHS", "EPOCHS", "NUM_TRAIN_EPOCHS", "TOTAL_EPOCHS"), _EPOCHS),
    "EVAL_BATCHES": "EVAL_PROMPTS is the number of questions in an evaluation",
    **dict.fromkeys(
        ("MAX_LENGTH", "MAX_LENGTH_TOTAL"),
        "MAX_LENGTH_SAMPLE limits the completion and MAX_PROMPT_LENGTH the prompt, in tokens",
    ),
    "LOG_COMPLETIONS": "SAMPLE_EVERY_STEPS says when a run shows a group of completions",
    "USE_VLLM": "ROLLOUT_BACKEND names the program that samples",
    "WARMUP_STEPS": "WARMUP_RATIO is the fraction of the schedule that is warmup",
    **dict.fromkeys(
        ("STEPS_PER_GENERATION", "PPO_MINI_BATCH_SIZE"),
        "NUM_MINI_BATCHES is the number of mini-batches into which a step's groups are divided",
    ),
    "DROP_ENDED": _ALWAYS,
    "PACKING": _ALWAYS,
    "SKIP_ZERO_ADVANTAGE": "it is on unless BETA, ENTROPY_COEF or TOP_ENTROPY_QUANTILE needs all",
    "LAYER_LOOP": "the device and REMAT decide",
    "PROMPT_TOO_LONG": "prompts longer than MAX_PROMPT_LENGTH are skipped; a line says how many",
    "REPETITION_NGRAM": "repetition_penalty counts n-grams of 3 tokens",
    "ACCURACY_OF": _ACCURACY,
    "ACCURACY_THRESHOLD": _ACCURACY,
    "HEARTBEAT_TIMEOUT_S": "a process that is silent for 30 seconds is dead",
    "NONFINITE_LIMIT": "3 steps in a row that are not finite end a run",
    "EXPORT_DTYPE": "the export has the run's DTYPE",
    "RESUME_FORCE": "to go on with other settings, set RESUME=RUN/checkpoints and a new OUTPUT_DIR",
    "REF_SYNC_STEPS": _REFERENCE,
    "REF_SYNC_ALPHA": _REFERENCE,
    "IMPORTANCE_SAMPLING_LEVEL": "LOSS_TYPE=gspo has a ratio for each sequence",
    "OFF_POLICY_MASK_THRESHOLD": "IS_MODE=sequence_mask drops sequences that are too far off",
}
# Names like those of settings that an environment may have for other purposes: they stop no run.
AMBIGUOUS = {"MODEL": "MODEL_PATH", "MODEL_NAME": "MODEL_PATH", "DATASET_NAME": "DATASET"}
AMBIGUOUS |= {"TRAIN_BATCH_SIZE": "ROLLOUT_GLOBAL_BATCH_SIZE", "RUN_NAME": "WANDB_NAME"}
# Environment names that start like this are never read as misspelt settings.
FOREIGN = ("WANDB_", "JAX_", "HF_", "TPU_", "XLA_", "SGLANG_")


def ignored_names(env: Mapping[str, str]) -> list[str]:
    """A line for each ambiguous name in the environment. A name gets no line if the environment has
    its setting too."""
    found = [(name, ours) for name, ours in AMBIGUOUS.items() if name in env and ours not in env]
    return [f"{name}={env[name]} is ignored; the setting is called {ours}" for name, ours in found]


def misspelt(name: str, known: Sequence[str]) -> str:
    """The known name of which an environment variable is a misspelling, or an empty text.

    In a misspelling the words that the two names do not share are similar too, or only left out:
    LERNING_RATE and BATCHSIZE are misspelt; MODULE_PATH and MY_BATCH_SIZE are other names.
    """
    # SED is a tool, not a typo of SEED, and TYPE is not a typo of DTYPE.
    if name.startswith(FOREIGN) or len(name) <= 3 or name == "TYPE":
        return ""
    name = name.upper()
    close = difflib.get_close_matches(name, known, cutoff=0.85)
    # The same letters in another order, such as STESP, are less alike than that.
    for meant in (*close, *(x for x in known if sorted(x) == sorted(name))):
        words, meant_words = name.split("_"), meant.split("_")
        extra = "".join(word for word in words if word not in meant_words)
        missing = "".join(word for word in meant_words if word not in words)
        if not extra or difflib.SequenceMatcher(None, extra, missing).ratio() >= 0.75:
            return meant
    return ""
