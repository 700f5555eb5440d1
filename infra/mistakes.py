"""The mistakes of a user: what ends a program with one line each, and names that are no settings.

Imports neither jax nor flax.
"""

import contextlib
import difflib
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import NoReturn


class UserMistake(ValueError):
    """A mistake in what the user has given: a line of text for each, which names what to change.

    It ends the program without a traceback; see `exit_with_mistakes`. All other errors keep their
    traceback.
    """


class Unwritable(Exception):
    """A file of the run or a checkpoint cannot be written: a line of text that says why.

    It ends a start with exit code 2, and a run that has taken a step with exit code 1. The same
    command resumes from the newest complete checkpoint.
    """


def exit_with_mistakes(error: UserMistake | Unwritable) -> NoReturn:
    """Ends the program before the first step: a line for each mistake, and exit code 2."""
    with contextlib.suppress(OSError):  # the pipe is closed
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
    raise SystemExit(2)


def in_one_line(error: BaseException, *, with_type: bool = True) -> str:
    """The type and the message of an error, without line breaks; at most 500 characters.

    with_type: False leaves out the type of an error that has a message.
    """
    kind, message = type(error).__name__, " ".join(str(error).split())
    return (f"{kind}: {message}" if with_type else message or kind)[:500]


@contextlib.contextmanager
def reading(mistake: str) -> Iterator[None]:
    """Turns an error of a library that reads what a setting names into the line `mistake: error`.

    The context holds only the library's call: errors of our own code must keep their traceback.
    """
    try:
        yield
    except Exception as error:  # libraries' errors about damaged files share no base
        raise UserMistake(f"{mistake}: {in_one_line(error)}") from None


@contextlib.contextmanager
def naming(setting: str, path: str) -> Iterator[None]:
    """Lets the mistakes in this context about a model name this setting and not MODEL_PATH."""
    try:
        yield
    except UserMistake as error:
        text = str(error).replace("MODEL_PATH=", "").replace("MODEL_PATH (or CHAT_TEMPLATE): ", "")
        text = text.partition(", or set CHAT_TEMPLATE")[0]  # it is the policy's
        raise UserMistake(f"{setting}={path}: {text}") from None


def import_optional(module: str, setting: str) -> ModuleType:
    """An optional module, such as "extras.turns". setting: the setting or the flag that
    needs it, with its value.

    Raises UserMistake if the file or its folder is missing. All other errors of the import, such as
    a package that the module needs and does not find, pass through unchanged.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # neither the module nor its folder
            raise
        raise UserMistake(
            f"{setting} needs {module.replace('.', '/')}.py, which is not in this folder; restore "
            f"it, or leave {setting.partition('=')[0]} out"
        ) from None


@contextlib.contextmanager
def writing(
    name: object, mistake: type[UserMistake] | type[Unwritable] = Unwritable
) -> Iterator[None]:
    """Turns an OSError within this context into a line that says that `name` cannot be written."""
    try:
        yield
    except OSError as error:
        raise mistake(f"{name} cannot be written: {error.strerror}") from None


# ---- Names that are no settings ------------------------------------------------------------------

# What other programs call our settings; a name in lower case occurs only in YAML.
CALLED = {
    "MODEL_PATH": "MODEL_NAME_OR_PATH MODEL_ID",
    "CHAT_TEMPLATE": "CHAT_TEMPLATE_PATH",
    "CHAT_TEMPLATE_KWARGS": "APPLY_CHAT_TEMPLATE_KWARGS",
    "LORA_RANK": "LORA_R",
    "LORA_TARGETS": "TARGET_MODULES LORA_TARGET_MODULES",
    "SEED": "RANDOM_SEED",
    "ROLLOUT_BACKEND": "ROLLOUT_ENGINE",
    "BATCH_SIZE": "ROLLOUT_PROMPT_BATCH_SIZE",
    "ROLLOUT_BATCH_SIZE": "GENERATION_BATCH_SIZE",
    "NUM_PRE_Q": "NUM_GENERATIONS GROUP_SIZE ROLLOUT_N rollout.n",
    "MAX_LENGTH_SAMPLE": "MAX_COMPLETION_LENGTH MAX_RESPONSE_LENGTH MAX_NEW_TOKENS MAX_LEN_SAMPLE",
    "REWARD_FN": "REWARD_FUNCS REWARD_FUNC",
    "REWARD_MODEL_PATH": "REWARD_MODEL_NAME_OR_PATH REWARD_PRETRAIN",
    "ENVIRONMENT_CLASS": "ENVIRONMENT_FACTORY",
    "STEPS": "MAX_STEPS NUM_STEPS TOTAL_STEPS TOTAL_TRAINING_STEPS TRAIN_STEPS TRAINING_STEPS "
    "NUM_TRAIN_STEPS MAX_TRAIN_STEPS",
    "TRAIN_MICRO_BATCH_SIZE": "MICRO_BATCH_SIZE MICRO_BATCH",
    "TRAIN_PER_DEVICE_MICRO_BATCH_SIZE": "PER_DEVICE_TRAIN_BATCH_SIZE MICRO_BATCH_SIZE_PER_DEVICE "
    "PPO_MICRO_BATCH_SIZE_PER_GPU",
    "GRAD_ACCUM_STEPS": "GRADIENT_ACCUMULATION_STEPS GRAD_ACCUM",
    "PPO_EPOCHS": "NUM_ITERATIONS",
    "OPTIMIZER": "OPTIM",
    "LEARNING_RATE": "LR LEARNRATE",
    "LR_SCHEDULE": "LR_SCHEDULER_TYPE LR_SCHEDULER",
    "WARMUP_RATIO": "LR_WARMUP_STEPS_RATIO",
    "CLIP_NORM": "MAX_GRAD_NORM GRAD_CLIP",
    "MESH_SHAPE": "MESH_SHAPE_FSDP",
    "REMAT": "GRADIENT_CHECKPOINTING USE_GRADIENT_CHECKPOINTING ENABLE_GRADIENT_CHECKPOINTING",
    "EPS_LOW": "EPSILON_LOW CLIP_RATIO_LOW",
    "EPS_HIGH": "EPSILON_HIGH CLIP_RATIO_HIGH",
    "DELTA": "CLIP_RATIO_C",
    "BETA": "KL_COEF KL_LOSS_COEF KL_BETA",
    "KL_ESTIMATOR": "KL_LOSS_TYPE KL_PENALTY",
    "ENTROPY_COEF": "ENTROPY_COEFF",
    "TEACHER_PATH": "TEACHER_MODEL_PATH TEACHER_MODEL_NAME_OR_PATH",
    "IS_MODE": "VLLM_IMPORTANCE_SAMPLING_MODE",
    "IS_CAP": "VLLM_IMPORTANCE_SAMPLING_CAP VLLM_IMPORTANCE_SAMPLING_CLIP_MAX",
    "EVAL_EVERY_STEPS": "EVAL_STEPS EVAL_EVERY TEST_FREQ",
    "EVAL_SAMPLES": "NUM_GENERATIONS_EVAL",
    "SAVE_EVERY_STEPS": "SAVE_STEPS SAVE_FREQ",
    "SAVE_KEEP": "SAVE_TOTAL_LIMIT MAX_ACTOR_CKPT_TO_KEEP",
    "RESUME": "RESUME_FROM_CHECKPOINT RESUME_MODE",
}
OTHER_NAMES = {name: ours for ours, names in CALLED.items() for name in names.split()}
# What other programs call our values.
CALLED_VALUES = {
    "naive": "vanilla",
    "warmup_cosine": "cosine",
    "constant": "constant_with_warmup",
    "dapo": "bnpo token-mean",
    "grpo": "seq-mean-token-mean sequence-mean-token-mean",
    "k1": "kl",
    "k2": "mse mse_kl",
    "k3": "low_var_kl",
}
OTHER_VALUES = {text: ours for ours, texts in CALLED_VALUES.items() for text in texts.split()}
# Names of other programs, and names that were settings here, without a counterpart: why.
WITHOUT_COUNTERPART = {
    "PARAM_DTYPE": "trained weights are float32, since bfloat16 loses most updates of them; to "
    "save memory lower TRAIN_PER_DEVICE_MICRO_BATCH_SIZE or use more devices",
    "NUM_EPOCHS EPOCHS NUM_TRAIN_EPOCHS TOTAL_EPOCHS": "STEPS is the number of steps; an epoch has "
    "as many as the dataset has questions, divided by the prompts of a step",
    "EPSILON CLIP_RATIO CLIP_EPS": "EPS_LOW and EPS_HIGH are the two sides of the clip",
    "EVAL_BATCHES": "EVAL_PROMPTS is the number of questions in an evaluation",
    "MAX_LENGTH MAX_LENGTH_TOTAL MAX_SEQ_LENGTH": "MAX_LENGTH_SAMPLE limits the completion and "
    "MAX_PROMPT_LENGTH the prompt, in tokens",
    "USE_VLLM": "ROLLOUT_BACKEND names the program that samples",
    "MAX_TOOL_CALLING_ITERATIONS": "MAX_TURNS is one more: it counts the last turn, too",
    "WARMUP_STEPS LR_WARMUP_STEPS": "WARMUP_RATIO is the fraction of the schedule that is warmup",
    "STEPS_PER_GENERATION PPO_MINI_BATCH_SIZE": "NUM_MINI_BATCHES is the number of mini-batches "
    "into which a step's groups are divided",
    "IMPORTANCE_SAMPLING_LEVEL": "LOSS_TYPE=gspo has one ratio per sequence, dapo one per token",
    "REF_SYNC_STEPS REF_SYNC_ALPHA REF_MODEL_SYNC_STEPS REF_MODEL_MIXUP_ALPHA": "the reference of "
    "BETA stays the initial model; for a newer one begin a new run from an export",
    "RESUME_FORCE": "RESUME=runs/x with a new OUTPUT_DIR continues a run with other settings",
    "ACCURACY_OF": "accuracy is that of the first function in REWARD_FN; its weight may be 0",
    "ACCURACY_THRESHOLD": "a completion is right if the first function in REWARD_FN gives 1",
    "PROMPT_TOO_LONG": "MAX_PROMPT_LENGTH skips longer prompts, and a line counts them",
    "EXPORT_DTYPE": "DTYPE is also the dtype of the export",
    "SKIP_ZERO_ADVANTAGE": "updates always leave out sequences that add nothing to the gradient",
    "DROP_ENDED": "with MAX_LENGTH_SAMPLE of 128 or more ended sequences leave the decoding",
    "PACKING": "updates always pack short sequences; TRAIN_MICRO_BATCH_SIZE limits their memory",
    "LAYER_LOOP": "the run chooses how layers are compiled, and config.yaml says what it chose",
    "NONFINITE_LIMIT": "a run always ends after 3 steps in a row that are not finite",
    "REPETITION_NGRAM": "repetition_penalty counts groups of 3 tokens; copy it for others",
}
NOT_SETTINGS = {
    name: reason for names, reason in WITHOUT_COUNTERPART.items() for name in names.split()
}
# Names like those of settings that an environment may have for other purposes: they stop no run.
AMBIGUOUS = {"MODEL": "MODEL_PATH", "MODEL_NAME": "MODEL_PATH", "DATASET_NAME": "DATASET"}
AMBIGUOUS |= {"TRAIN_BATCH_SIZE": "ROLLOUT_GLOBAL_BATCH_SIZE", "RUN_NAME": "WANDB_NAME"}
AMBIGUOUS |= {"MAX_TOKENS": "MAX_LENGTH_SAMPLE"}  # clients of LLMs read it, too
# Environment names that start like this are never misspelt settings; recipes/judge.py has the last.
FOREIGN = ("WANDB_", "JAX_", "HF_", "TPU_", "XLA_", "SGLANG_", "JUDGE_MODEL")


def describe_ignored_names(env: Mapping[str, str], known: Sequence[str] = ()) -> list[str]:
    """A line for each ambiguous name in the environment whose setting is not in it, for each name
    of several words that all are words of settings, and for each word that differs from a setting
    in one letter but the first, such as STEPZ. known: the names of all settings."""
    lines = [
        f"{name}={env[name]} is ignored; the setting is called {ours}"
        for name, ours in AMBIGUOUS.items()
        if name in env and ours not in env
    ]
    words = {word for name in known for word in name.split("_")}
    others = sorted(x for x in {*env} - {*known} - {*AMBIGUOUS} if not x.startswith(FOREIGN))
    # Its value is not shown, since it may be a secret of another program.
    reason = "is ignored: no setting has this name (`python config.py` lists all)"
    lines += [f"{x} {reason}" for x in others if "_" in x and words.issuperset(x.split("_"))]
    pairs = ((x, y) for x in others for y in known if len(x) == len(y) > 4 and x[0] == y[0])
    close = ((x, y) for x, y in pairs if sum(map(str.__ne__, x, y)) == 1 and "_" not in x)
    # They stop no run: STEMS may be of another program.
    return lines + [f"{x} is ignored; did you mean {y}?" for x, y in close]


def find_misspelt_name(name: str, known: Sequence[str]) -> str:
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
