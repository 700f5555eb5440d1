"""The teacher of TEACHER_PATH: a frozen model that judges each token that the policy has drawn.

The advantage of a token is DISTILL_COEF * (log p_teacher - log p_old) + REWARD_COEF * the advantage
of its completion. On average the gradient of the first term is that of the reverse KL from the
policy to the teacher (https://thinkingmachines.ai/blog/on-policy-distillation).

Both log-probabilities are at TEMPERATURE, and of a softmax over the same tokens: the support from
which the token was drawn (TOP_K, TOP_P, MIN_P), or else the vocabulary. Sizes of a family may have
different numbers of rows beyond the tokenizer's tokens. These rows are padding, which is hardly
ever drawn; a teacher's additional ones are not read.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
from tokenizers import Tokenizer

from config import Config
from infra.chips import attribute_oom_to
from infra.mistakes import UserMistake, naming, reading
from infra.sizes import Sizes
from model import hf
from model.layout import mesh_text
from model.network import ComputeConfig
from model.params import ModelConfig
from model.placement import gib_per_device, num_params, plan_frozen, raise_if_too_long
from update import LearnerConfig


def read_teacher(
    cfg: Config, student_folder: Path, vocab_size: int, sizes: Sizes, S: int, longest: int
) -> tuple[Path, ComputeConfig]:
    """The folder of the teacher, and how it is computed. Prints its size; no weight is read.

    vocab_size: of the student. S: as for plan_compute. longest: tokens of the longest prompt.
    Raises UserMistake for a model that cannot judge the student.
    """
    with naming("TEACHER_PATH", cfg.teacher_path):
        folder = hf.fetch_model(cfg.teacher_path)
        model, tokens = hf.read_config(folder), read_tokens(folder)
        hf.check_weights(folder, model, len(tokens))
        raise_if_tokens_differ(tokens, read_tokens(student_folder))
        raise_if_too_long(cfg.max_length_sample, model, longest)
        compute = plan_teacher(cfg, model, vocab_size, sizes, S, jax.devices())
    mesh, size = mesh_text(compute.layout.mesh), f"{gib_per_device(compute):.2f} GiB on each device"
    print(f"teacher={folder} parameters={num_params(model) / 1e6:.2f}M mesh={mesh} ({size})")
    return folder, compute


def read_tokens(folder: Path) -> dict[int, str]:
    """{id: token} of a folder's tokenizer. Raises UserMistake."""
    with reading(f"{folder}/tokenizer.json cannot be read"):
        vocabulary = Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab()
    return {i: token for token, i in vocabulary.items()}


def raise_if_tokens_differ(teacher: dict[int, str], student: dict[int, str]) -> None:
    """Raises UserMistake, with the first differing token, unless each id of the student is the same
    token of the teacher, which may have more of them."""
    for i in sorted(student):
        if teacher.get(i) != student[i]:
            tokens = f"{teacher.get(i)!r}, and that of the trained model {student[i]!r}"
            raise UserMistake(f"token {i} of its tokenizer is {tokens}; a teacher needs the same")


def plan_teacher(
    cfg: Config,
    model: ModelConfig,
    vocab_size: int,
    sizes: Sizes,
    S: int,
    devices: Sequence[jax.Device],
) -> ComputeConfig:
    """How the teacher is computed: on MESH_SHAPE and in the dtype of training. vocab_size: of the
    student. Raises UserMistake."""
    compute = plan_frozen(cfg, model, sizes, S, devices)
    rows = min(model.vocab_size, vocab_size)
    return compute._replace(model=dataclasses.replace(compute.model, vocab_size=rows))


def load_weights(teacher: LearnerConfig, folder: Path) -> LearnerConfig:
    """The teacher with its weights, in the dtype and the arrangement that `forward` needs, so that
    no program copies them. Raises UserMistake."""
    compute, model = teacher.compute, hf.read_config(folder)
    place, rows = (compute.layout.mesh, compute.dtype), compute.model.vocab_size
    with attribute_oom_to(f"the teacher ({gib_per_device(compute):.2f} GiB on each device)"):
        base = hf.load_params(folder, model, *place, compute.layer_loop, vocab_size=rows)
        jax.block_until_ready(base)
    return dataclasses.replace(teacher, base=base)
