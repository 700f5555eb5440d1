"""A small model and the sequences of one of its programs, whose work is easy to count by hand, and
micro-batches of given sequences."""

from collections.abc import Iterable

import numpy as np

from models.model import ModelConfig
from models.placement import Workload
from runtime.packing import Batch, Row, Widths, pack

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


def in_rows(
    batch: Batch, share: int, sequences: Iterable[int] | None = None, S: int = 0
) -> dict[str, np.ndarray]:
    """The arrays of a MicroBatch that holds sequences of the batch in their order, so many in each
    row; then R is their number. sequences: None means all. S: places for prompts; 0: as needed.
    """
    chosen = list(range(len(batch.completion_ids)) if sequences is None else sequences)
    parts = [chosen[i : i + share] for i in range(0, len(chosen), share)]
    rows = [Row(sorted({batch.prompt_of(i) for i in part}), part) for part in parts]
    S = S or max(sum(len(batch.prompts[p]) - 1 for p in row.prompts) for row in rows)
    T = batch.completion_ids.shape[1]
    return pack(batch, rows, Widths(1, S, share * T, share, T), pad_id=0)
