"""Qwen2/Qwen2.5, Qwen3 (dense), Llama 3 and Gemma 3 (text): their weights, and how training,
prefill and decode compute them.

Dimensions: X inputs of t tokens: packed rows or prompts; R sequences, V vocabulary, D model, F
feed-forward, L layers, H query heads, N kv heads, h head_dim.

In all three uses the last prompt token is fed together with the completion. So the prompt gives
only keys and values, hidden state i predicts completion token i, and no use is a special case:

    training  hidden, _ = forward([prompt[:-1] of some prompts,
                                   (last token, completion[:-1]) of their completions])
    prefill   _, kv = forward(prompt[:, :-1])                           once per prompt
    decode    hidden, kv = forward_token(last token, Cache(kv, ...))    once per new token

A training input is a row of such prompts and completions, end to end (runtime/packing.py).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.attention import KV, Cache, PackedRows, attention, cached_attention, of_layer, write
from models.blocks import ALL_POSITIONS
from runtime.layout import TRAIN_BATCH_AXES, Layout, constrain, gather_fsdp, mesh_text
from runtime.mistakes import UserMistake


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


class Compute(NamedTuple):
    """A model and how it is computed. Apart from rounding, results depend only on the model.

    It is hashable, so that jitted functions can take it as a static argument.
    """

    model: ModelConfig
    dtype: Any  # of matmuls and activations; softmax, norms and rotary angles are float32
    layout: Layout
    remat: str = "none"  # what backward computes again; dots: all but matmuls
    logps_kernel: Any = None  # what computes token_logps: the Kernel of loss_pallas.py; None: jnp
    attention_impl: str = "xla"  # xla or splash, see attention.py
    layer_loop: str = "scan"  # unroll: the program has code, arrays and caches for each layer
    shares_base: bool = False  # of a rollout with LoRA: it reads the base of training, not a copy


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


# ---- The forward ---------------------------------------------------------------------------------


def forward(
    params: Params, compute: Compute, ids: jax.Array, positions: jax.Array, rows: PackedRows
) -> tuple[jax.Array, KV | tuple[KV, ...]]:
    """The final hidden states of `ids`, after the last norm, and their keys and values.

    ids, positions: [X, t] int32. rows: which of them see each other.
    Returns hidden [X, t, D] in compute.dtype, and the KV of all layers: stacked like params.layers,
    or a tuple of layers.
    """
    layout, model = compute.layout, compute.model
    rotary = _rotary(model, positions)

    def layer(x: jax.Array, w_and_local: tuple[LayerWeights, Any]) -> tuple[jax.Array, KV]:
        w, local = w_and_local
        w = _usable(w, compute)
        q, kv = _qkv(x, w, compute, _rotary_of_layer(rotary, local))
        seen = rows if local is None else rows.within(positions, _window(model, local))
        out = attention(q, kv, seen, layout, compute.attention_impl)
        return _after_attention(x, out, w, compute), kv

    if compute.remat != "none":
        saved = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
        layer = jax.checkpoint(layer, policy=saved[compute.remat], prevent_cse=False)  # of a scan
    x = _embed(params.embed, ids, compute)
    if isinstance(params.layers, Layers):
        weights = LayerWeights(params.layers, params.adapters)
        x, kv = jax.lax.scan(layer, x, (weights, _local(model)))
    else:
        kv = ()
        for i in range(model.num_layers):
            x, new = layer(x, (_weights_of_layer(params, i), _local(model, i)))
            kv = (*kv, new)
    return _rms_norm(x, params.final_norm, model).reshape(*ids.shape, -1), kv


def forward_token(
    params: Params, compute: Compute, token: jax.Array, position: jax.Array, cache: Cache
) -> tuple[jax.Array, KV | tuple[KV, ...]]:
    """The same for one new token of each sequence, which sees the keys and values of the cache.

    token, position: [R] int32. Returns hidden [R, D], and cache.completion with the keys and values
    of the new tokens written to it.
    """
    rotary = _rotary(compute.model, position[:, None])

    def layer(i: Any, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        x, completion = carry
        w, local = _usable(_weights_of_layer(params, i), compute), _local(compute.model, i)
        q, kv = _qkv(x, w, compute, _rotary_of_layer(rotary, local))
        completion = write(completion, i, kv, cache.index)
        this_layer = cache._replace(
            prompt=of_layer(cache.prompt, i), completion=of_layer(completion, i)
        )
        window = None if local is None else _window(compute.model, local)
        out = cached_attention(q, this_layer, compute.layout, window)
        return _after_attention(x, out, w, compute), completion

    carry = _embed(params.embed, token[:, None], compute), cache.completion
    if isinstance(params.layers, Layers):
        # A loop updates a carry in place; an input and output of a scan would be copied.
        carry = jax.lax.fori_loop(0, compute.model.num_layers, layer, carry)
    else:
        for i in range(compute.model.num_layers):
            carry = layer(i, carry)
    x, completion = carry
    return _rms_norm(x, params.final_norm, compute.model), completion


def lm_head(params: Params) -> jax.Array:
    """[V, D] output embedding."""
    return params.embed if params.lm_head is None else params.lm_head


def prefix_of(prompt_ids: jax.Array, prompt_mask: jax.Array) -> tuple[jax.Array, ...]:
    """ids, positions and mask [G, S] of left-padded prompts [G, S+1] without their last token."""
    mask = prompt_mask[:, :-1].astype(bool)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)  # [G, S]
    return prompt_ids[:, :-1], positions, mask


def _embed(embed: jax.Array, ids: jax.Array, compute: Compute) -> jax.Array:
    """[X*t, D] embeddings of ids [X, t]. With two dimensions matmuls have fast gradients on a CPU.

    fsdp splits D of the table, so each device looks up a slice of D for the inputs of all devices
    along fsdp; an all-to-all then gives each device the complete vectors of its inputs. The table
    and its gradient never move.
    """
    layout = compute.layout
    x = embed[constrain(ids, layout, "dp")].astype(compute.dtype)
    x = constrain(constrain(x, layout, "dp", None, "fsdp"), layout, TRAIN_BATCH_AXES)
    if compute.model.gemma3:  # bfloat16 makes 34 of sqrt(1152) = 33.94, as when Gemma was trained
        x = x * jnp.asarray(math.sqrt(compute.model.hidden_size), x.dtype)
    return x.reshape(ids.size, -1)


class LayerWeights(NamedTuple):
    """The weights of a layer, or of all layers, stacked."""

    base: Layers
    adapters: Layers | None  # an Adapter for each matrix that has one; None: without LoRA

    def linear(self, x: jax.Array, name: str, lora: Lora | None) -> jax.Array:
        """x W for the matrix W of this name, and what its adapter adds."""
        y, adapter = x @ getattr(self.base, name), getattr(self.adapters, name, None)
        if adapter is None:
            return y
        return y + (x @ adapter.a * (lora.alpha / lora.rank)) @ adapter.b


def _weights_of_layer(params: Params, i: Any) -> LayerWeights:
    return LayerWeights(of_layer(params.layers, i), of_layer(params.adapters, i))


def _usable(w: LayerWeights, compute: Compute) -> LayerWeights:
    """The weights of a layer in compute.dtype, gathered over fsdp."""
    table = param_table(compute.model)
    return jax.tree.map(
        lambda a, leaf: gather_fsdp(a.astype(compute.dtype), leaf.axes[1:], compute.layout),
        w,
        LayerWeights(table.layers, table.adapters),
    )


def _after_attention(x: jax.Array, out: jax.Array, w: LayerWeights, compute: Compute) -> jax.Array:
    """The output [X*t, D] of a layer. x: its input. out: of its attention, [X, t, H*h]."""
    layout, model, lora = compute.layout, compute.model, compute.model.lora

    def normed(y: jax.Array, scale: jax.Array | None) -> jax.Array:
        return y if scale is None else _rms_norm(y, scale, model)

    out = constrain(out.reshape(len(x), -1), layout, TRAIN_BATCH_AXES, "tp")
    y = constrain(w.linear(out, "wo", lora), layout, TRAIN_BATCH_AXES)
    x = x + normed(y, w.base.attn_post_norm)
    y = _rms_norm(x, w.base.mlp_norm, model)
    y = _activation(w.linear(y, "gate", lora), model) * w.linear(y, "up", lora)
    y = constrain(w.linear(y, "down", lora), layout, TRAIN_BATCH_AXES)
    return x + normed(y, w.base.mlp_post_norm)


def _activation(x: jax.Array, model: ModelConfig) -> jax.Array:
    if model.gemma3 is None:
        return jax.nn.silu(x)
    # In bfloat16 the 1 + tanh of GELU would have few digits for negative x.
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def _rms_norm(x: jax.Array, scale: jax.Array, model: ModelConfig) -> jax.Array:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + model.rms_norm_eps)
    if model.gemma3:  # the scale is rounded first, so that training and rollout have the same
        return (wide * inverse * (1 + scale.astype(x.dtype).astype(jnp.float32))).astype(x.dtype)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


def _qkv(
    x: jax.Array, w: LayerWeights, compute: Compute, rotary: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, KV]:
    """Rotated queries [X, t, H, h], and the keys and values, of the input [X*t, D] of a layer."""
    model, layout = compute.model, compute.layout
    X, t = rotary[0].shape[:2]
    base = w.base
    y = _rms_norm(x, base.attn_norm, model)

    def heads(name: str, bias: jax.Array | None, norm: jax.Array | None, count: int) -> Any:
        z = w.linear(y, name, model.lora)
        z = z if bias is None else z + bias
        # First comes the layout that the weights give, then the layout that attention needs. With
        # the second alone the compiler would gather the weights in every layer, for every token.
        z = constrain(z, layout, TRAIN_BATCH_AXES, "tp").reshape(X, t, count, model.head_dim)
        if "tp" in layout.batch_axes:
            z = constrain(z, layout, layout.batch_axes)
        return z if norm is None else _rms_norm(z, norm, model)

    q = _rotate(heads("wq", base.bq, base.q_norm, model.num_heads), rotary)
    if model.gemma3:  # attention divides by sqrt(h)
        q = q * math.sqrt(model.head_dim / model.gemma3.query_scalar)
    k = _rotate(heads("wk", base.bk, base.k_norm, model.num_kv_heads), rotary)
    v = heads("wv", base.bv, None, model.num_kv_heads)
    return q, KV(k.transpose(0, 2, 3, 1), v.swapaxes(1, 2))


def _local(model: ModelConfig, i: Any = slice(None)) -> jax.Array | None:
    """Of layer i, or [L] of all layers: 1 if it is a local layer of Gemma 3, 0 if it is a global
    one; None: the model is of another family."""
    return jnp.array(model.gemma3.local_layers, jnp.int32)[i] if model.gemma3 else None


def _window(model: ModelConfig, local: jax.Array) -> jax.Array:
    """How many positions a token sees in a layer of Gemma 3."""
    return jnp.where(local, model.gemma3.window, ALL_POSITIONS)


def _rotary_of_layer(rotary: tuple[jax.Array, jax.Array], local: Any) -> Any:
    return rotary if local is None else tuple(x[local] for x in rotary)


def _rotary(model: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [X, t, 1, h/2] float32 of the rotary angles; of Gemma 3 [2, X, t, 1, h/2], for
    global and for local layers."""
    angles = positions[:, :, None, None].astype(jnp.float32) * _inverse_frequencies(model)
    return jnp.cos(angles), jnp.sin(angles)


@functools.lru_cache
def _inverse_frequencies(model: ModelConfig) -> np.ndarray:
    """[h/2] float32 radians per position, of Gemma 3 [2, 1, 1, 1, h/2]. rope_llama3 slows long
    wavelengths, as Llama 3.1 does."""
    half = np.arange(0, model.head_dim, 2, dtype=np.float64) / model.head_dim
    inverse = model.rope_theta**-half
    if gemma := model.gemma3:
        inverse = np.stack([inverse / gemma.rope_factor, gemma.local_rope_theta**-half])
        inverse = inverse[:, None, None, None]
    if model.rope_llama3:
        factor, low, high, original = model.rope_llama3
        turns = original * inverse / (2 * np.pi)  # full turns within the original context
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1 leaves a wavelength as it is
        inverse = keep * inverse + (1 - keep) * inverse / factor
    return inverse.astype(np.float32)


def _rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [X, t, heads, h] with its halves (not pairs) rotated, as Hugging Face's weights need it."""
    cos, sin = rotary
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
