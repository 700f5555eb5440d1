"""A small model and the sequences of one of its programs, whose work is easy to count by hand."""

from models.model import ModelConfig
from models.placement import Workload

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
