"""The weights of Qwen2/Qwen2.5, Qwen3 (dense), Llama 3 and Gemma 3 (text): their shapes, the mesh
axes that split them, their Hugging Face names, and which of them training changes.

Dimensions: V vocabulary, D model, F feed-forward, L layers, H query heads, N kv heads, h head_dim.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infra.mistakes import UserMistake
from model.layout import mesh_text


class Lora(NamedTuple):
    """Low-rank adapters (LoRA, arXiv 2106.09685): x W becomes x W + (alpha / rank) (x A) B, and
    training changes A and B alone."""

    rank: int  # r, the columns of A and the rows of B
    alpha: float
    targets: tuple[str, ...]  # the matrices with adapters, as Hugging Face names them: q_proj, ...


class Gemma3(NamedTuple):
    """What Gemma 3 alone has. Its norms, also behind attention and feed-forward, multiply by
    1 + scale, its embeddings by sqrt(D), and its feed-forward has GELU. In local layers a token
    sees only the last positions; the other layers are global."""

    query_scalar: float  # scores are divided by its square root, not by that of h
    rope_factor: float  # global layers divide positions by it
    local_rope_theta: float
    window: int  # how many positions a token sees in a local layer, its own included
    local_layers: tuple[bool, ...]  # for each layer, whether it is local
    sees_images: bool = False  # the folder also has a part for images, which is left alone


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # N
    head_dim: int  # h
    rms_norm_eps: float
    rope_theta: float
    rope_llama3: tuple[float, float, float, int] | None  # factor, low, high, original positions
    tied: bool  # the embedding is also the lm_head
    qkv_bias: bool
    qk_norm: bool
    max_positions: int  # tokens
    lora: Lora | None = None  # None: training changes all weights
    gemma3: Gemma3 | None = None  # None: the model is of another family


# ---- The parameters: shapes, mesh axes and Hugging Face names, side by side ----------------------


@flax.struct.dataclass
class Layers:
    """The weights of all layers, with the layer as the first dimension of each array, or of one
    layer, without it. An array that a model family lacks is None."""

    attn_norm: Any
    wq: Any
    wk: Any
    wv: Any
    wo: Any
    bq: Any
    bk: Any
    bv: Any
    q_norm: Any
    k_norm: Any
    attn_post_norm: Any
    mlp_norm: Any
    gate: Any
    up: Any
    down: Any
    mlp_post_norm: Any


class Adapter(NamedTuple):
    """What LoRA adds to a matrix [in, out]."""

    a: Any  # A, [in, r]
    b: Any  # B, [r, out]


@flax.struct.dataclass
class Params:
    """All weights of a model; the same tree also holds their shapes, shardings or gradients."""

    embed: Any
    layers: Layers | tuple[Layers, ...]  # of all layers; unrolled: one for each layer
    final_norm: Any
    lm_head: Any  # None: the embedding is also the lm_head
    adapters: Any = None  # like layers, but with an Adapter for each matrix that has one, or None


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What one weight array of Params is."""

    shape: tuple[int, ...]
    axes: tuple[Any, ...]  # for each dimension the mesh axis or axes that split it, or None
    name: str  # its name in a Hugging Face file; {} stands for the layer's number
    transposed: bool = False  # the file holds [out, in], Params hold [in, out]
    kind: str = "matrix"  # matrix, norm, bias, A or B: how it is initialized, and if it decays


def param_table(model: ModelConfig, layer_loop: str = "scan") -> Params:
    """A Params of Leaf: the shape, the sharding and the Hugging Face name of every weight."""
    L, D, F, V = model.num_layers, model.hidden_size, model.intermediate_size, model.vocab_size
    h = model.head_dim
    Hh, Nh = model.num_heads * h, model.num_kv_heads * h
    block = "model.layers.{}."
    attn, mlp = block + "self_attn.", block + "mlp."

    def bias(width: int, name: str) -> Leaf | None:
        leaf = Leaf((L, width), (None, "tp"), attn + name, kind="bias")
        return leaf if model.qkv_bias else None

    def norm(width: int, name: str) -> Leaf:
        return Leaf((L, width), (None, None), name, kind="norm")

    gemma, after_attention = model.gemma3 is not None, block + "post_attention_layernorm.weight"
    # The other families call the norm before the feed-forward so.
    before_mlp = block + "pre_feedforward_layernorm.weight" if gemma else after_attention
    layers = Layers(
        attn_norm=norm(D, block + "input_layernorm.weight"),
        wq=Leaf((L, D, Hh), (None, "fsdp", "tp"), attn + "q_proj.weight", True),
        wk=Leaf((L, D, Nh), (None, "fsdp", "tp"), attn + "k_proj.weight", True),
        wv=Leaf((L, D, Nh), (None, "fsdp", "tp"), attn + "v_proj.weight", True),
        wo=Leaf((L, Hh, D), (None, ("tp", "fsdp"), None), attn + "o_proj.weight", True),
        bq=bias(Hh, "q_proj.bias"),
        bk=bias(Nh, "k_proj.bias"),
        bv=bias(Nh, "v_proj.bias"),
        q_norm=norm(h, attn + "q_norm.weight") if model.qk_norm else None,
        k_norm=norm(h, attn + "k_norm.weight") if model.qk_norm else None,
        attn_post_norm=norm(D, after_attention) if gemma else None,
        mlp_norm=norm(D, before_mlp),
        gate=Leaf((L, D, F), (None, "fsdp", "tp"), mlp + "gate_proj.weight", True),
        up=Leaf((L, D, F), (None, "fsdp", "tp"), mlp + "up_proj.weight", True),
        down=Leaf((L, F, D), (None, ("tp", "fsdp"), None), mlp + "down_proj.weight", True),
        mlp_post_norm=norm(D, block + "post_feedforward_layernorm.weight") if gemma else None,
    )
    adapters = jax.tree.map(lambda leaf: _adapter(leaf, model), layers) if model.lora else None
    if layer_loop == "unroll":
        layers = tuple(_of_layer(layers, i) for i in range(L))
        adapters = tuple(_of_layer(adapters, i) for i in range(L)) if adapters else None
    return Params(
        embed=Leaf((V, D), ("tp", "fsdp"), "model.embed_tokens.weight"),
        layers=layers,
        final_norm=Leaf((D,), (None,), "model.norm.weight", kind="norm"),
        lm_head=None if model.tied else Leaf((V, D), ("tp", "fsdp"), "lm_head.weight"),
        adapters=adapters,
    )


def _adapter(matrix: Leaf, model: ModelConfig) -> Adapter | None:
    """The rows of a matrix's adapter, if it has one, named as PEFT does; in and out are split as
    those of the matrix."""
    (block, module, _), lora = matrix.name.rsplit(".", 2), model.lora
    if model.gemma3 and model.gemma3.sees_images:  # so transformers calls the model of text
        block = block.replace("model.", "model.language_model.", 1)
    if matrix.kind != "matrix" or module not in lora.targets:
        return None
    (L, n_in, n_out), (_, in_axes, out_axes) = matrix.shape, matrix.axes
    name = f"base_model.model.{block}.{module}.lora_"
    return Adapter(
        a=Leaf((L, n_in, lora.rank), (None, in_axes, None), name + "A.weight", True, "A"),
        b=Leaf((L, lora.rank, n_out), (None, None, out_axes), name + "B.weight", True, "B"),
    )


def _of_layer(rows: Layers, i: int) -> Layers:
    """The rows of layer i alone."""
    return jax.tree.map(
        lambda leaf: dataclasses.replace(
            leaf, shape=leaf.shape[1:], axes=leaf.axes[1:], name=leaf.name.format(i)
        ),
        rows,
    )


def trained(params: Params) -> Params:
    """The part of a Params that training changes: all of it, or the adapters alone."""
    if params.adapters is None:
        return params
    return Params(embed=None, layers=None, final_norm=None, lm_head=None, adapters=params.adapters)


def on_base(base: Params | None, changed: Params) -> Params:
    """All weights: those that training changes, as `trained` returns them, and those of the base,
    which is None without LoRA."""
    return changed if changed.adapters is None else base.replace(adapters=changed.adapters)


def arrange_layers(params: Params, layer_loop: str, dtype: Any) -> Params:
    """Params as `forward` needs them for this layer_loop; unrolled layers stay as they are.

    dtype: of unrolled layers. They are copies, so they should have the dtype of the matmuls.
    """
    if layer_loop == "scan":
        return params

    def unroll(x: Any) -> Any:
        if not isinstance(x, Layers):
            return x
        L = len(jax.tree.leaves(x)[0])
        return tuple(jax.tree.map(lambda a, i=i: a[i].astype(dtype), x) for i in range(L))

    return params.replace(layers=unroll(params.layers), adapters=unroll(params.adapters))


def unrolled(x: Any) -> bool:
    """Whether this part of a Params is a tuple of layers; an Adapter is another tuple."""
    return type(x) is tuple


def stop_if_indivisible(setting: str, model: ModelConfig, mesh: Mesh) -> None:
    """Raises UserMistake, naming the setting, if the mesh does not divide every weight evenly."""
    for leaf in jax.tree.leaves(param_table(model)):
        for size, axes in zip(leaf.shape, leaf.axes, strict=True):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            if size % math.prod(mesh.shape[axis] for axis in axes):
                sizes = " * ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
                raise UserMistake(
                    f"{setting} (dp,fsdp,tp) = {mesh_text(mesh)}: {sizes} does not divide "
                    f"{leaf.name} {[*leaf.shape]}; use a smaller {axes[-1]} and more dp"
                )


def abstract_params(model: ModelConfig, mesh: Mesh, dtype: Any, layer_loop: str = "scan") -> Params:
    """Shapes, dtypes and shardings of the weights on a mesh, whose devices need not exist here."""

    def shape(leaf: Leaf) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*leaf.axes))
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    return jax.tree.map(shape, param_table(model, layer_loop))


def param_shardings(model: ModelConfig, mesh: Mesh, layer_loop: str = "scan") -> Params:
    """A Params of NamedSharding: where every weight lies on the mesh."""
    shapes = abstract_params(model, mesh, jnp.float32, layer_loop)
    return jax.tree.map(lambda shape: shape.sharding, shapes)


def init_params(model: ModelConfig, key: jax.Array) -> Params:
    """Random float32 Params as transformers and PEFT make them: normal(0, 0.02), norms multiply by
    1, biases 0, A uniform within 1 / sqrt(in), and B 0, so that adapters change nothing yet."""
    leaves, tree = jax.tree.flatten(param_table(model))

    def init(leaf: Leaf, leaf_key: jax.Array) -> jax.Array:
        if leaf.kind == "matrix":
            return 0.02 * jax.random.normal(leaf_key, leaf.shape)
        if leaf.kind == "A":
            most = leaf.shape[1] ** -0.5
            return jax.random.uniform(leaf_key, leaf.shape, minval=-most, maxval=most)
        ones = leaf.kind == "norm" and model.gemma3 is None
        return jnp.ones(leaf.shape) if ones else jnp.zeros(leaf.shape)

    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([init(leaf, k) for leaf, k in zip(leaves, keys, strict=True)])


def lm_head(params: Params) -> jax.Array:
    """[V, D] output embedding."""
    return params.embed if params.lm_head is None else params.lm_head
