"""Makes tiny/: a Qwen2 of about 1M parameters, its tokenizer, and word problems like GSM8K's.

    python tiny/make.py    # takes minutes on 2 cores and replaces the files of tiny/

--folder and --config make another small model that has to learn the same, see docs/experts.md.

Supervised training first teaches the model to calculate. Then it teaches, with the prompt of a run,
the answers of a pupil who forgets most carries. After that the model keeps to the answer format and
finds most answers in a few attempts, but its most likely answer is often wrong, so that
reinforcement learning has arithmetic to teach.
"""

import argparse
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder

import data
from chat import ChatFormat
from config import Config
from demonstrations import build_demonstrations
from infra.mistakes import UserMistake, exit_with_mistakes
from infra.sizes import derive_sizes, prompt_width
from model import hf
from model.layout import TRAIN_BATCH_AXES, Layout, make_mesh
from model.network import ComputeConfig
from model.params import init_params, param_shardings
from optimizer import Schedule, init_state, learning_rate
from rewards import SYSTEM_PROMPT, TAGS
from startup import make_learner
from train_sft import batch_of
from update import train_on_mini_batch

SEED = 0
FOLDER = Path(__file__).resolve().parents[1] / "tiny"
TRAIN, TEST = 4000, 500  # word problems


class Stage(NamedTuple):
    """A stage of the supervised training."""

    steps: int
    prompts: int  # per step
    solutions: int  # per prompt
    system_prompt: str
    mistakes: float  # the probability of a mistake in a solution, see `solution`
    careful_steps: int = 0  # at the start, whose solutions have no mistakes
    peak_lr: float = 1e-3


# First the model learns to calculate, then the prompt of a run and the mistakes of a pupil.
STAGES = (Stage(900, 64, 1, "", 0.0), Stage(150, 32, 4, SYSTEM_PROMPT, 0.6))

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}
END, PAD = "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# ---- Word problems -------------------------------------------------------------------------------

NAMES = ["Ana", "Ben", "Carla", "Dev", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas"]
THINGS = ["apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps"]


# A kind of problem is its two operations: x = a op1 b, then y = x op2 c. Every number has at most
# two digits. These are the least and the greatest values of a and b; c is from 2 to 9.
OPERANDS = {
    "+-": ((5, 20), (5, 20)),
    "++": ((5, 20), (5, 20)),
    "--": ((25, 40), (5, 15)),
    "-+": ((20, 40), (5, 19)),
}
QUESTIONS = {
    "+-": (
        "{name} has {a} {things} and buys {b} more. Then {name} gives away {c}. "
        "How many {things} does {name} have now?",
        "There were {a} {things} on the table. {name} put {b} more there and took {c} away. "
        "How many {things} are on the table?",
        "{name} found {a} {things} on Monday and {b} on Tuesday, but lost {c} of them. "
        "How many {things} are left?",
    ),
    "++": (
        "{name} has {a} {things}. A friend gives {name} {b} more, and another friend {c} more. "
        "How many {things} does {name} have?",
        "On three days {name} collected {a}, {b} and {c} {things}. "
        "How many {things} is that altogether?",
        "A red box holds {a} {things}, a blue box {b} and a green box {c}. "
        "How many {things} are in the boxes?",
    ),
    "--": (
        "{name} had {a} {things}. In the morning {name} sold {b}, and later {c}. "
        "How many {things} are left?",
        "There are {a} {things} in a shop. {name} buys {b} and Kim buys {c}. "
        "How many {things} remain in the shop?",
        "Of {a} {things}, {b} were red, {c} were blue and the rest green. "
        "How many {things} were green?",
    ),
    "-+": (
        "{name} had {a} {things}, lost {b} and then found {c}. "
        "How many {things} does {name} have now?",
        "A bus carries {a} people. At the next stop {b} get off and {c} get on. "
        "How many people are on the bus?",
        "{name} sold {b} of {a} {things} and bought {c} new ones. "
        "How many {things} does {name} have?",
    ),
}


def problem(ops: str, operands: tuple[int, ...], rng: random.Random) -> dict[str, str]:
    """An example in the form of GSM8K, whose answer shows each calculation as <<a+b=x>>."""
    a, b, c = operands
    names = {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
    question = rng.choice(QUESTIONS[ops]).format(a=a, b=b, c=c, **names)
    x = calculate(a, ops[0], b)
    y = calculate(x, ops[1], c)
    both = f"{a}{ops[0]}{b}={x}", f"{x}{ops[1]}{c}={y}"
    lines = [f"{text.split('=')[0]} = <<{text}>>{text.split('=')[1]}" for text in both]
    return {"question": question, "answer": "\n".join([*lines, f"#### {y}"])}


def calculate(a: int, op: str, b: int, carry: bool = True) -> int:
    """a + b or a - b; without `carry` as a pupil calculates who forgets the carry of the units."""
    sign = 1 if op == "+" else -1
    if carry:
        return a + sign * b
    return (a // 10 + sign * (b // 10)) * 10 + (a % 10 + sign * (b % 10)) % 10


def word_problems(rng: random.Random) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The train and the test examples; no kind occurs in both with the same operands."""
    train, test = [], []
    for ops, limits in OPERANDS.items():
        ranges = [range(least, greatest + 1) for least, greatest in (*limits, (2, 9))]
        chosen = rng.sample(list(itertools.product(*ranges)), (TRAIN + TEST) // len(OPERANDS))
        examples = [problem(ops, operands, rng) for operands in chosen]
        test += examples[: TEST // len(OPERANDS)]
        train += examples[TEST // len(OPERANDS) :]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def write_examples(folder: Path, train: list[dict[str, str]], test: list[dict[str, str]]) -> None:
    for name, examples in (("train", train), ("test", test)):
        text = "".join(json.dumps(example) + "\n" for example in examples)
        (folder / f"{name}.jsonl").write_text(text)


def solution(example: dict[str, str], mistakes: float, rng: random.Random) -> list[str]:
    """The only turn of the completion that supervised training teaches.

    Each calculation forgets its carry with probability `mistakes`; the next uses the wrong result.
    """
    texts = [line.split("<<")[1].split("=")[0] for line in example["answer"].split("\n")[:-1]]
    (a, op, b), (_, op2, c) = (re.split("([-+])", text) for text in texts)
    x = calculate(int(a), op, int(b), rng.random() >= mistakes)
    y = calculate(x, op2, int(c), rng.random() >= mistakes)
    return [f"<think>{a}{op}{b}={x}, {x}{op2}{c}={y}</think>\n<answer>{y}</answer>"]


# ---- Tokenizer -----------------------------------------------------------------------------------


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Writes the files of a byte-level BPE tokenizer, in which each digit is a separate token."""
    tokenizer = Tokenizer(BPE())
    words = Regex(r" ?[A-Za-z]+|[0-9]|\n| ?[^\sA-Za-z0-9]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [PAD, "<|im_start|>", END]
    trainer = BpeTrainer(
        vocab_size=1024,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


# ---- Model ---------------------------------------------------------------------------------------


def write_config(folder: Path, values: dict[str, object]) -> None:
    """Writes the config.json of a model with these values, for the tokenizer in the folder."""
    tokenizer = hf.load_tokenizer(folder)
    ids = {"vocab_size": -(-len(tokenizer) // 64) * 64, "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(values | ids, indent=1) + "\n")


# ---- Supervised warm-up --------------------------------------------------------------------------


def demonstrate(example: dict[str, str], turns: list[str]) -> data.Example:
    """The example with a completion of these turns, of the model and of the user alternately."""
    roles = itertools.cycle(["assistant", "user"])
    messages = [{"role": next(roles), "content": text} for text in turns]
    return example | {"completions": (messages, "")}


def warm_up(
    folder: Path,
    examples: list[dict[str, str]],
    stages: Sequence[Stage],
    solution: Callable[[dict[str, str], float, random.Random], list[str]] = solution,
    T: int = 32,
) -> None:
    """Writes the weights of the folder's model, trained on solutions of the examples. Each use of
    an example draws a new solution of at most T tokens: turns of the model, with turns of the user
    between them."""
    model, tokenizer, rng = hf.read_config(folder), hf.load_tokenizer(folder), random.Random(SEED)
    mesh = make_mesh("MESH_SHAPE", "1,1,1", jax.devices()[:1])
    compute = ComputeConfig(model, jnp.dtype("float32"), Layout(mesh, TRAIN_BATCH_AXES))
    params = jax.device_put(init_params(model, jax.random.key(SEED)), param_shardings(model, mesh))
    for stage in stages:
        chat_format = ChatFormat(tokenizer, [{"role": "system", "content": stage.system_prompt}])
        prompts = data.build_prompts(examples, chat_format)
        S = prompt_width(max(len(prompt.ids) for prompt in prompts)) - 1
        sizes = {"batch_size": stage.prompts, "num_pre_q": stage.solutions, "max_length_sample": T}
        cfg = Config(loss_type="sft", train_micro_batch_size=16, **sizes)
        learner = make_learner(cfg, derive_sizes(cfg, 1, 1), compute, S, pad_id=0)
        state = init_state(params, optimizer=learner.optimizer, model=model)
        for i in range(stage.steps):
            indices = data.batch_indices(len(examples), stage.prompts, i, SEED)
            mistakes = stage.mistakes if i >= stage.careful_steps else 0.0
            solved = [
                demonstrate(examples[j], solution(examples[j], mistakes, rng))
                for j in np.repeat(indices, stage.solutions)
            ]
            demonstrations = build_demonstrations(solved, chat_format)
            batch = batch_of(demonstrations, T)._replace(prompts=demonstrations[:: stage.solutions])
            lr = learning_rate(i, Schedule(stage.peak_lr, "linear", 0.05, stage.steps))
            state, metrics = train_on_mini_batch(learner, state, batch, lr)
            if i % 50 == 0 or i == stage.steps - 1:
                loss = metrics["loss"]
                print(f"warm-up mistakes={mistakes} step={i} loss={loss:.4f}", flush=True)
        params = state.params
    hf.save_tensors(dict(hf.hf_tensors(params, model)), folder / hf.WEIGHTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="Folder of all files.")
    help = "Values of config.json that differ from those of tiny/, as JSON."
    parser.add_argument("--config", type=json.loads, default={}, help=help)
    args = parser.parse_args()
    folder, rng = args.folder, random.Random(SEED)
    folder.mkdir(parents=True, exist_ok=True)
    train, test = word_problems(rng)
    write_examples(folder, train, test)
    texts = [f"{example['question']} {solution(example, 0.0, rng)[0]}" for example in train]
    write_tokenizer(folder, texts + [f"{SYSTEM_PROMPT} system user assistant"] * 50)
    write_config(folder, MODEL | args.config)
    warm_up(folder, train, STAGES)


if __name__ == "__main__":
    try:
        main()
    except UserMistake as error:
        exit_with_mistakes(error)
