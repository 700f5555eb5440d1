"""A small model and the sequences of one of its programs, whose work is easy to count by hand, and
micro-batches of given sequences."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from config import Config
from data import Prompt
from models.model import ModelConfig
from models.placement import Workload
from runtime.packing import Batch, Widths, pack, prompts_of

# The matrices of a layer have 16*32 + 2*16*16 + 32*16 + 3*16*24 = 2688 numbers, those of three
# layers 8064. All parameters: 48*16 + 3*(2688 + 2*16) + 16 = 8944.
MODEL = ModelConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_llama3=None,
    tied=True,
    qkv_bias=False,
    qk_norm=False,
    max_positions=64,
)
# 8 sequences of 2 prompts: 8*6 + 2*10 = 68 tokens, 2*10*10/2 + 8*(6*10 + 6*6/2) = 724 pairs of
# a query and a key.
WORKLOAD = Workload(R=8, G=2, S=10, T=6)


def batch_of(
    prompts: Iterable[Sequence[int]],
    completion_ids: np.ndarray,
    completion_mask: np.ndarray,
    sampling_logps: np.ndarray,
    advantages: np.ndarray,
    *others: np.ndarray | None,
    **named: np.ndarray | None,
) -> Batch:
    """A batch whose masks have no holes. prompts: their token ids. others: from old_logps on."""
    others = dict(zip(("old_logps", "ref_logps", "top_mask"), others, strict=False))
    return Batch(
        [Prompt(ids, {}) for ids in prompts],
        completion_ids,
        completion_mask,
        lengths=completion_mask.sum(axis=1),
        sampling_logps=sampling_logps,
        advantages=advantages,
        **others | named,
    )


def in_rows(
    batch: Batch, share: int, sequences: Iterable[int] | None = None, S: int = 0
) -> dict[str, np.ndarray]:
    """The arrays of a MicroBatch that holds sequences of the batch in their order, so many in each
    row; then R is their number. sequences: None means all. S: places for prompts; 0: as needed.
    """
    chosen = list(range(len(batch.completion_ids)) if sequences is None else sequences)
    rows = [chosen[i : i + share] for i in range(0, len(chosen), share)]
    lengths = [len(prompt.ids) - 1 for prompt in batch.prompts]
    S = S or max(sum(lengths[p] for p in prompts_of(batch, row)) for row in rows)
    T = batch.completion_ids.shape[1]
    return pack(batch, rows, Widths(1, S, share * T, share, T), pad_id=0)


def counts_by_hand(num_tokens: int, num_sequences: int, num_top_tokens: int) -> dict[str, Any]:
    """What policy_loss divides by."""
    counts = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    counts |= {"num_top_tokens": num_top_tokens}
    return {name: np.float32(count) for name, count in counts.items()}


def choices_of(name: str) -> list[str]:
    """The texts that a setting may have. name: that of the field in Config."""
    return Config.__dataclass_fields__[name].metadata["choices"].split("|")
