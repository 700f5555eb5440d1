"""The configuration of a model and its weights: one table lists the shape, the mesh axes, the
Hugging Face name and the initialization of every weight.

Sharding, loading, the export, checkpoints and the optimizer follow from this table. With LoRA
training changes only the adapters, and all other weights are the base.

Dimensions: V vocabulary, D model, F feed-forward, L layers, E experts, H query heads, N kv heads, h
head_dim.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from infra.mistakes import UserMistake
from model.int8 import Int8
from model.layout import Axis, mesh_text


class Lora(NamedTuple):
    """Low-rank adapters (LoRA, arXiv 2106.09685): x W becomes x W + (alpha / rank) (x A) B, and
    training changes only A and B."""

    rank: int  # the columns of A and the rows of B
    alpha: float
    targets: tuple[str, ...]  # the matrices with adapters, as Hugging Face names them: q_proj, ...
    int8_base: bool = False  # the large matrices of the base are Int8

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Rope(NamedTuple):
    """Rotary positions (RoPE, arXiv 2104.09864), whose frequencies families.py computes."""

    theta: float
    rotated: int | None = None  # the first numbers of a head, which alone are rotated; None: all
    # Positions are divided by it, or for each frequency by one of several.
    factor: float | tuple[float, ...] = 1.0
    # factor, low, high and original positions of Llama 3.1, which slows long wavelengths
    llama3: tuple[float, float, float, int] | None = None


class Variant(NamedTuple):
    """What may differ between layers with full attention, whose weights have the same shapes."""

    rope: Rope | None  # None: nothing is rotated
    window: int | None = None  # positions that a token sees, its own included; None: all


FULL, LINEAR = "full_attention", "linear_attention"  # kinds of layers


class LinearSizes(NamedTuple):
    """The sizes of linear layers (linear_attention.py)."""

    key_heads: int
    value_heads: int
    key_dim: int  # numbers of a key head
    value_dim: int
    taps: int  # of the convolution


class Moe(NamedTuple):
    """The experts of each layer's feed-forward (experts.py)."""

    experts: int  # E
    top_k: int  # experts of a token
    normed: bool  # the weights of a token's experts are divided by their sum
    shared_width: int = 0  # F of an expert that all tokens share; 0: there is none


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What a model computes. families.py, which knows the families, sets the fields."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F; with experts that of each
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # N
    head_dim: int  # h
    rms_norm_eps: float
    variants: tuple[Variant, ...]
    tied: bool  # the embedding is also the lm_head
    max_positions: int  # tokens; less than the file says with the windows of Mistral, longrope
    qkv_bias: bool = False
    qk_norm: bool = False
    lora: Lora | None = None  # None: training changes all weights
    layer_variants: tuple[int, ...] = ()  # [L], the index of its variant; (): all have the first
    period: tuple[str, ...] = (FULL,)  # the kinds of layers that repeat; the last is FULL
    linear: LinearSizes | None = None  # None: the period has no LINEAR layers
    moe: Moe | None = None  # None: the feed-forward has no experts
    output_gate: bool = False  # attention's output is multiplied by the sigmoid of a gate
    norm_adds_one: bool = False  # norms multiply by 1 + scale
    post_norms: bool = False  # norms also follow attention and feed-forward
    activation: str = "silu"  # of the feed-forward, in ACTIVATIONS of families.py
    embedding_multiplier: float = 1.0  # of embeddings; in Gemma sqrt(D)
    query_multiplier: float = 1.0  # of queries, in addition to the 1 / sqrt(h) of attention
    residual_multiplier: float = 1.0  # of what attention and feed-forward add to their input
    logits_divisor: float = 1.0  # Granite's logits_scaling
    attention_softcap: float = 0.0  # scores s become cap tanh(s / cap); 0: they do not
    logits_softcap: float = 0.0  # of the logits, before the temperature
    rotary_scale: float = 1.0  # of the cosines and sines of rotary angles
    # Fields of Layers, and the names of their tensors in files where they are not those of Llama.
    # Weights with the same name are the rows of one tensor, in this order.
    names: tuple[tuple[str, str], ...] = ()
    sees_images: bool = False  # transformers opens it with a vision tower, which is not read
    has_score: bool = False  # a reward model: its lm_head is score.weight, [1, D]

    @property
    def num_periods(self) -> int:
        """The periods of layers, which the layer loop takes one by one."""
        return self.num_layers // len(self.period)

    def count_layers(self, kind: str) -> int:
        return self.num_periods * self.period.count(kind)

    def has_windows(self) -> bool:
        return any(variant.window for variant in self.variants)


@flax.struct.dataclass
class Layers:
    """The weights of one layer, in the shapes below, or of the layers of all periods, stacked along
    a first dimension. An array that a layer does not have is None. The linear layers of a period
    are in its layer with full attention. init_params gives random numbers to the arrays in the
    order of the fields.

    The shapes of linear layers have the names of LinearSizes; channels = 2 key_heads * key_dim +
    value_heads * value_dim.
    """

    attn_norm: Any = None  # [D]
    wq: Any = None  # [D, H*h]; with output_gate [D, H*2*h], a gate behind each head's queries
    wk: Any = None  # [D, N*h]
    wv: Any = None  # [D, N*h]
    wo: Any = None  # [H*h, D]; of a linear layer [value_heads*value_dim, D]
    bq: Any = None  # [H*h]
    bk: Any = None  # [N*h]
    bv: Any = None  # [N*h]
    q_norm: Any = None  # [h]
    k_norm: Any = None  # [h]
    attn_post_norm: Any = None  # [D], of post_norms
    mlp_norm: Any = None  # [D]
    gate: Any = None  # [D, F]; of experts [E, D, F]
    up: Any = None  # [D, F]; of experts [E, D, F]
    down: Any = None  # [F, D]; of experts [E, F, D]
    mlp_post_norm: Any = None  # [D], of post_norms
    router: Any = None  # [D, E]
    shared_gate: Any = None  # [D, shared_width]; from here on: of the shared expert
    shared_up: Any = None  # [D, shared_width]
    shared_down: Any = None  # [shared_width, D]
    shared_weight: Any = None  # [D, 1], for the sigmoid that multiplies its output
    in_qkv: Any = None  # [D, channels]; from here on: of linear layers
    in_z: Any = None  # [D, value_heads*value_dim], for the gate of the output
    in_b: Any = None  # [D, value_heads], for beta
    in_a: Any = None  # [D, value_heads], for the decay
    taps: Any = None  # [channels, 1, taps], the filters of the convolution
    a_log: Any = None  # [value_heads] float32
    dt_bias: Any = None  # [value_heads]
    out_norm: Any = None  # [value_dim] float32
    # The linear layers by their index in a period. (A tuple would be unrolled layers.)
    linear: list["Layers"] | None = None


# Fields and kinds of leaves that are float32 in each copy of the weights, as in files of Qwen3.5.
ALWAYS_FLOAT32 = ("a_log", "out_norm")


def cast(weights: Any, dtype: DTypeLike) -> Any:
    """The arrays of a part of Params in this dtype, but for ALWAYS_FLOAT32 and those of an Int8."""

    def cast_array(path: Any, x: jax.Array) -> jax.Array:
        is_kept = getattr(path[-1], "name", "") in (*ALWAYS_FLOAT32, *Int8._fields)
        return x if is_kept else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast_array, weights)


class Adapter(NamedTuple):
    """The low-rank factors that LoRA adds to a matrix [in, out]."""

    a: Any  # A, [in, rank]; None: that of the matrix in FIRST_PARTS
    b: Any  # B, [rank, out]


# Matrices that may be behind another one in the same tensor, whose adapter has one A.
FIRST_PARTS = {"wk": "wq", "wv": "wq", "up": "gate"}


def share_a(adapters: Any) -> Any:
    """The adapters, a Layers or None, with the A of FIRST_PARTS in those that have none."""
    for name, first in FIRST_PARTS.items() if adapters else ():
        adapter = getattr(adapters, name)
        if adapter is not None and adapter.a is None:
            shared = adapter._replace(a=getattr(adapters, first).a)
            adapters = dataclasses.replace(adapters, **{name: shared})
    return adapters


@flax.struct.dataclass
class Params:
    """All weights of a model, or only its adapters; then the other fields are None. The same tree
    also holds shapes, shardings or gradients of the weights."""

    embed: Any
    layers: Layers | tuple[Layers, ...] | None  # stacked; unrolled: one Layers for each period
    final_norm: Any
    lm_head: Any  # None: the embedding is also the lm_head
    adapters: Any = None  # as layers, with an Adapter for each adapted matrix and None elsewhere


# ---- The table of all weights --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The description of one weight array."""

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]  # the mesh axes that split each dimension
    # In a Hugging Face file; {} stands for the layer's number, and * for each expert's, if each of
    # them has its own tensor.
    name: str
    transposed: bool = False  # the file holds [out, in], Params hold [in, out]
    # Or experts, router, norm, bias, A, B, taps, a_log, dt_bias or out_norm; it decides on
    # initialization, weight decay, dtype, int8 and adapters.
    kind: str = "matrix"
    layers: range = range(0)  # the numbers of the layers along the first dimension, if it has them
    int8: bool = False  # Params hold it as an Int8
    first_row: int = 0  # of its rows in the file's tensor, which may be those of several weights

    def dtype(self, dtype: DTypeLike) -> DTypeLike:
        """The dtype of the array in a copy of the weights in this dtype."""
        return jnp.float32 if self.kind in ALWAYS_FLOAT32 else dtype


def param_table(model: ModelConfig, layer_loop: str = "scan") -> Params:
    """A Params of Leaf, with stacked layers for "scan" or a tuple of layers for "unroll"."""
    V, D = model.vocab_size, model.hidden_size
    layers = _layer_table(model)
    adapters = _adapter_table(layers, model, model.lora) if model.lora else None
    if model.lora and model.lora.int8_base:
        layers = jax.tree.map(_in_int8, layers)
    head = None if model.tied else Leaf((V, D), ("tp", "fsdp"), "lm_head.weight")
    table = Params(
        embed=Leaf((V, D), ("tp", "fsdp"), "model.embed_tokens.weight"),
        layers=layers,
        final_norm=Leaf((D,), (None,), "model.norm.weight", kind="norm"),
        lm_head=Leaf((1, D), (None, "fsdp"), "score.weight") if model.has_score else head,
        adapters=adapters,
    )
    if layer_loop == "scan":
        return table
    periods = range(model.num_periods)
    return dataclasses.replace(
        table,
        layers=tuple(_leaves_of_period(layers, i) for i in periods),
        adapters=tuple(_leaves_of_period(adapters, i) for i in periods) if adapters else None,
    )


def _in_int8(leaf: Leaf) -> Leaf:
    is_gate = "in_proj_a." in leaf.name or "in_proj_b." in leaf.name
    return dataclasses.replace(leaf, int8=leaf.kind in ("matrix", "experts") and not is_gate)


def _layer_table(model: ModelConfig) -> Layers:
    *linear, full = (_leaves_at(model, i) for i in range(len(model.period)))
    return dataclasses.replace(full, linear=linear or None)


def _leaves_at(model: ModelConfig, index: int) -> Layers:
    """The leaves of the layers with this index in their periods."""
    D, F, moe = model.hidden_size, model.intermediate_size, model.moe
    numbers, block = range(index, model.num_layers, len(model.period)), "model.layers.{}."

    L, leaf = len(numbers), functools.partial(Leaf, layers=numbers)

    def column_parallel(n_in: int, n_out: int, name: str) -> Leaf:  # tp splits the outputs
        return leaf((L, n_in, n_out), (None, "fsdp", "tp"), f"{block}{name}.weight", True)

    def row_parallel(n_in: int, n_out: int, name: str) -> Leaf:  # tp splits the inputs
        return leaf((L, n_in, n_out), (None, ("tp", "fsdp"), None), f"{block}{name}.weight", True)

    def vector(size: int, name: str, kind: str = "norm", axis: Axis = None) -> Leaf:
        return leaf((L, size), (None, axis), block + name, kind=kind)

    leaves: dict[str, Any]
    if model.linear and model.period[index] == LINEAR:
        sizes = model.linear
        attn, heads, width = "linear_attn.", sizes.value_heads, sizes.value_heads * sizes.value_dim
        channels = 2 * sizes.key_heads * sizes.key_dim + width
        taps = (L, channels, 1, sizes.taps), (None, "tp", None, None)
        leaves = {
            "wo": row_parallel(width, D, attn + "out_proj"),
            "in_qkv": column_parallel(D, channels, attn + "in_proj_qkv"),
            "in_z": column_parallel(D, width, attn + "in_proj_z"),
            "in_b": column_parallel(D, heads, attn + "in_proj_b"),
            "in_a": column_parallel(D, heads, attn + "in_proj_a"),
            "taps": leaf(*taps, f"{block}{attn}conv1d.weight", kind="taps"),
            "a_log": vector(heads, attn + "A_log", "a_log", "tp"),
            "dt_bias": vector(heads, attn + "dt_bias", "dt_bias", "tp"),
            "out_norm": vector(sizes.value_dim, attn + "norm.weight", "out_norm"),
        }
    else:
        attn, h = "self_attn.", model.head_dim
        query_width, kv_width = model.num_heads * h, model.num_kv_heads * h
        widths = {"q": (1 + model.output_gate) * query_width, "k": kv_width, "v": kv_width}
        leaves = {f"w{x}": column_parallel(D, n, f"{attn}{x}_proj") for x, n in widths.items()}
        leaves["wo"] = row_parallel(query_width, D, attn + "o_proj")
        if model.qkv_bias:
            bias = functools.partial(vector, kind="bias", axis="tp")
            leaves |= {f"b{x}": bias(n, f"{attn}{x}_proj.bias") for x, n in widths.items()}
        if model.qk_norm:
            leaves |= {f"{x}_norm": vector(h, f"{attn}{x}_norm.weight") for x in "qk"}
        if model.post_norms:
            leaves |= {x: vector(D, x) for x in ("attn_post_norm", "mlp_post_norm")}
    leaves |= {
        "attn_norm": vector(D, "input_layernorm.weight"),
        "mlp_norm": vector(D, "post_attention_layernorm.weight"),
    }
    prefix, mlp, width = "", "mlp.", F
    if moe:
        prefix, mlp, width = "shared_", "mlp.shared_expert.", moe.shared_width
    if width:
        leaves |= {prefix + x: column_parallel(D, width, f"{mlp}{x}_proj") for x in ("gate", "up")}
        leaves[prefix + "down"] = row_parallel(width, D, mlp + "down_proj")
    if moe:  # tp splits the experts
        wide, narrow = (L, moe.experts, D, F), (L, moe.experts, F, D)
        shapes = {"gate": wide, "up": wide, "down": narrow}
        for x, shape in shapes.items():
            axes = (None, "tp", None, "fsdp") if x == "down" else (None, "tp", "fsdp", None)
            leaves[x] = leaf(shape, axes, f"{block}mlp.experts.*.{x}_proj.weight", True, "experts")
        router = functools.partial(leaf, axes=(None, "fsdp", None), transposed=True, kind="router")
        leaves["router"] = router((L, D, moe.experts), name=f"{block}mlp.gate.weight")
        if width:
            name = f"{block}mlp.shared_expert_gate.weight"
            leaves["shared_weight"] = router((L, D, 1), name=name)
    rows: dict[str, int] = {}  # of each tensor so far
    for field, name in model.names:
        changes = dict(name=block + name, first_row=rows.get(name, 0))
        leaves[field] = dataclasses.replace(leaves[field], **changes)
        rows[name] = leaves[field].first_row + leaves[field].shape[-1]
    return Layers(**leaves)


def _adapter_table(layers: Layers, model: ModelConfig, lora: Lora) -> Layers:
    """The layers with an Adapter in place of each adapted matrix, named as PEFT names it, and None
    elsewhere. `in` and `out` are split as those of the matrix."""

    def adapter(matrix: Leaf) -> Adapter | None:
        block, module, _ = matrix.name.rsplit(".", 2)
        if matrix.kind != "matrix" or module not in lora.targets:
            return None
        if model.sees_images:  # transformers' name of its language model
            block = block.replace("model.", "model.language_model.", 1)
        (L, n_in, n_out), (_, in_axis, out_axis) = matrix.shape, matrix.axes
        name, rank = f"base_model.model.{block}.{module}.lora_", lora.rank
        leaf = functools.partial(Leaf, transposed=True, layers=matrix.layers)
        a = leaf((L, n_in, rank), (None, in_axis, None), name + "A.weight", kind="A")
        b = leaf((L, rank, n_out), (None, None, out_axis), name + "B.weight", kind="B")
        b = dataclasses.replace(b, first_row=matrix.first_row)
        return Adapter(None if matrix.first_row else a, b)

    return jax.tree.map(adapter, layers)


def _leaves_of_period(layers: Layers, i: int) -> Layers:
    def select_layer(leaf: Leaf) -> Leaf:
        shape, axes, name = leaf.shape[1:], leaf.axes[1:], leaf.name.format(leaf.layers[i])
        return dataclasses.replace(leaf, shape=shape, axes=axes, name=name, layers=range(0))

    return jax.tree.map(select_layer, layers)


# ---- From the table: checks, shapes, shardings and first values ----------------------------------


def raise_if_indivisible(setting: str, model: ModelConfig, mesh: Mesh) -> None:
    """Raises UserMistake, naming the setting, if the mesh does not divide every weight evenly."""
    for leaf in jax.tree.leaves(param_table(model)):
        for size, axis in zip(leaf.shape, leaf.axes, strict=True):
            names: tuple[str, ...] = (axis,) if isinstance(axis, str) else axis or ()
            if size % math.prod(mesh.shape[name] for name in names):
                sizes = " * ".join(f"{name}={mesh.shape[name]}" for name in names)
                raise UserMistake(
                    f"{setting} (dp,fsdp,tp) = {mesh_text(mesh)}: {sizes} does not divide "
                    f"{leaf.name} {[*leaf.shape]}; use a smaller {names[-1]} and more dp"
                )


def abstract_params(
    model: ModelConfig, mesh: Mesh, dtype: DTypeLike, layer_loop: str = "scan"
) -> Params:
    """Shapes, dtypes and shardings of the weights on a mesh, whose devices need not exist here."""
    table = param_table(model, layer_loop)
    return jax.tree.map(lambda leaf: abstract_array(leaf, mesh, dtype), table)


def abstract_array(leaf: Leaf, mesh: Mesh, dtype: DTypeLike) -> Any:
    """The ShapeDtypeStruct of a weight on a mesh, or an Int8 of two; scales are split as columns.
    dtype: of the copy of the weights."""

    def array(
        shape: tuple[int, ...], axes: tuple[Axis, ...], dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    shape, axes = leaf.shape, leaf.axes
    if not leaf.int8:
        return array(shape, axes, leaf.dtype(dtype))
    columns = (*shape[:-2], shape[-1]), (*axes[:-2], axes[-1])
    return Int8(array(shape, axes, jnp.int8), array(*columns, jnp.float32))


def param_shardings(model: ModelConfig, mesh: Mesh, layer_loop: str = "scan") -> Params:
    shapes = abstract_params(model, mesh, jnp.float32, layer_loop)
    return jax.tree.map(lambda shape: shape.sharding, shapes)


def param_formats(model: ModelConfig, mesh: Mesh, layer_loop: str = "scan") -> Params:
    """param_shardings, and on TPUs also the layouts in memory, as decode reads large matrices. With
    the compiler's own, decode would copy matrices whose columns are no multiple of 128."""

    def format_of(x: jax.ShapeDtypeStruct) -> Sharding | Format:
        large = x.ndim > 1 and min(x.sharding.shard_shape(x.shape)[-2:]) >= 128
        by_rows = large and mesh.devices.flat[0].platform == "tpu"
        return Format(MemoryLayout(tuple(range(x.ndim))), x.sharding) if by_rows else x.sharding

    return jax.tree.map(format_of, abstract_params(model, mesh, jnp.float32, layer_loop))


def init_params(model: ModelConfig, key: jax.Array) -> Params:
    """Random float32 Params, initialized as in transformers and PEFT: matrices are normal(0, 0.02),
    norms multiply by 1, biases are 0, in linear layers dt_bias is 1 and exp(a_log) uniform in (0,
    16). A is uniform within 1 / sqrt(in), and B is 0, so that new adapters do not change the
    model."""
    leaves, tree = jax.tree.flatten(param_table(model))

    def init(leaf: Leaf, leaf_key: jax.Array) -> jax.Array:
        if leaf.kind in ("matrix", "experts", "router", "taps"):
            return 0.02 * jax.random.normal(leaf_key, leaf.shape)
        if leaf.kind == "A":
            bound = leaf.shape[1] ** -0.5
            return jax.random.uniform(leaf_key, leaf.shape, minval=-bound, maxval=bound)
        if leaf.kind == "a_log":
            return jnp.log(jax.random.uniform(leaf_key, leaf.shape, minval=0.01, maxval=16))
        adds_one = leaf.kind == "norm" and model.norm_adds_one
        ones = leaf.kind in ("norm", "out_norm", "dt_bias") and not adds_one
        return jnp.ones(leaf.shape) if ones else jnp.zeros(leaf.shape)

    keys = jax.random.split(key, len(leaves))
    arrays = [init(leaf, k) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, arrays)


# ---- Parts of Params -----------------------------------------------------------------------------


def trainable_params(params: Params) -> Params:
    """The part of the weights that training changes: all of them, or only the adapters."""
    if params.adapters is None:
        return params
    return Params(embed=None, layers=None, final_norm=None, lm_head=None, adapters=params.adapters)


def combine_params(base: Params | None, changed: Params) -> Params:
    """All weights: `changed`, as trainable_params returns them, with the base if they are only
    adapters. base: without LoRA it may be None."""
    if base is None or changed.adapters is None:
        return changed
    return dataclasses.replace(base, adapters=changed.adapters)


def arrange_layers(params: Params, layer_loop: str, dtype: DTypeLike) -> Params:
    """Params as `forward` reads them for this layer_loop; layers that are unrolled already are
    returned as they are.

    dtype: of unrolled layers. They are copies, so they should have the dtype of the matmuls.
    """
    if layer_loop == "scan":
        return params

    def unroll(layers: Any) -> Any:
        if not isinstance(layers, Layers):
            return layers
        periods = range(len(jax.tree.leaves(layers)[0]))
        return tuple(cast(jax.tree.map(lambda x, i=i: x[i], layers), dtype) for i in periods)

    layers, adapters = unroll(params.layers), unroll(params.adapters)
    return dataclasses.replace(params, layers=layers, adapters=adapters)


def is_unrolled(part: Any) -> bool:
    """Whether this part of a Params is a tuple of layers. An Adapter, a NamedTuple, is not."""
    return type(part) is tuple


def lm_head(params: Params) -> jax.Array:
    return params.embed if params.lm_head is None else params.lm_head
