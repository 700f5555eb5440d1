"""Claims about tools/roofline.py, each by numbers from hand."""

from typing import Any

import jax
import pytest
from small_model import MODEL, WORKLOAD

from runtime.chips import Work
from runtime.layout import make_mesh
from tools import roofline

# ---- Rollout -------------------------------------------------------------------------------------


def test_a_device_receives_the_weights_once_without_the_part_that_it_has() -> None:
    # 4 * 8944 / 8 = 4472 bytes read; 2 * 8944 / tp written, of which tp/8 is already there
    assert roofline.sync_work(MODEL, 8, 1) == Work(0, 4472 + 17888, 17888 * 7 / 8)
    assert roofline.sync_work(MODEL, 8, 2) == Work(0, 4472 + 8944, 8944 * 6 / 8)
    assert roofline.sync_work(MODEL, 8, 8) == Work(0, 4472 + 2236, 0)


def test_prefill_by_hand() -> None:
    # 2*10 tokens and 100 pairs on 8 devices: 2*8064*2.5, and 4*32 FLOPs a pair in three layers.
    # A token moves 2*(4*16 + 2*32 + 2*16 + 3*24) = 464 bytes a layer.
    flops, activations = 40320 + 4800, 2.5 * 3 * 464
    assert roofline.prefill_work(MODEL, 8, 1, WORKLOAD) == Work(flops, 16128 + activations, 0, 0)
    # All-reduces of 5 tokens of 32 bytes send half of them twice; three layers have two each.
    assert roofline.prefill_work(MODEL, 8, 2, WORKLOAD) == Work(flops, 8064 + activations, 960, 12)


# ---- Training ------------------------------------------------------------------------------------


def train_work(mesh_shape: str, **changes: Any) -> Work:
    settings = {"backward": True, "remat": "full", "impl": "jax"} | changes
    mesh = make_mesh("MESH_SHAPE", mesh_shape, jax.devices())
    return roofline.train_work(MODEL, mesh, WORKLOAD, **settings)


LAYERS = 2 * 8064 * 68 + 128 * 3 * 724  # FLOPs of forward
HEAD = 2 * 48 * 16 * 48


def test_model_flops_are_the_flops_of_one_forward() -> None:
    assert (WORKLOAD.tokens, WORKLOAD.pairs) == (68, 724)
    assert roofline.model_flops(MODEL, WORKLOAD) == LAYERS + HEAD == 1_448_448


@pytest.mark.parametrize(
    "changes, layers, head",
    [
        ({"backward": False}, 1, 1),
        ({"remat": "none"}, 3, 4),
        ({"remat": "dots"}, 3, 4),
        (
            {"remat": "full"},
            4,
            4,
        ),  # forward runs twice; backward has two matmuls for each matmul of forward
        ({"impl": "full"}, 4, 3),  # the logits are kept
        ({"impl": "pallas", "backward": False}, 1, 1),
    ],
)
def test_a_micro_step_has_the_flops_of_this_many_forwards(
    changes: dict[str, Any], layers: int, head: int
) -> None:
    for mesh_shape in ("1,8,1", "2,2,2"):
        work = train_work(mesh_shape, **changes)
        assert work.flops == (layers * LAYERS + head * HEAD) / 8


def test_a_forward_pass_by_hand() -> None:
    # 68/8 tokens of 464 bytes a layer; half of the 8064 weights are written and read
    # 3/4 of half the layers' and the head's weights are gathered; embeddings of 17 tokens; and in
    # three layers two all-reduces of 17 tokens over tp, of which half go twice
    hbm, ici = 8.5 * 3 * 464 + 16128, (8064 + 768 + 17 * 32) * 3 / 4 + 3264
    assert train_work("1,4,2", backward=False) == Work((LAYERS + HEAD) / 8, hbm, ici)


def test_a_micro_step_by_hand() -> None:
    # activations four times; weights gathered twice, gradients once; and the loss
    loss = roofline.loss_costs("jax", 12, 16, 24, "cpu")[1]
    work = train_work("1,4,2")
    assert work.hbm_bytes == 4 * 8.5 * 3 * 464 + 3 * 16128 + loss
    # the head's weights are gathered twice, its gradient is float32: 8 bytes each
    # forward, forward again and backward have all-reduces over tp
    assert work.ici_bytes == (3 * 8064 + 8 * 384 + 2 * 17 * 32) * 3 / 4 + 3 * 3264
    assert train_work("1,4,2", remat="none").ici_bytes == work.ici_bytes - 3264


def test_the_bytes_of_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # 12 x 24 float32 logits are 1152 bytes; hidden and weights 384 and 768 of bfloat16, their
    # gradients 768 and 1536 of float32
    full = 8 * 1152 + 3 * (384 + 768) + 1536
    assert roofline.loss_costs("full", 12, 16, 24, "cpu") == (3, full)
    for tiles in (1, 4):  # in each: hidden three times, its gradient read and written
        monkeypatch.setattr(roofline, "LOGITS_TILE_BYTES", 1152 // tiles)
        tiled = 6.5 * 1152 + tiles * (3 * 384 + 2 * 768) + 3 * 768 + 1536
        assert roofline.loss_costs("jax", 12, 16, 24, "cpu") == (4, tiled)
    # Of three tiles: hidden and 12 x 128 float32 statistics in, out; the same in backward, which
    # has hidden's gradient in and out too.
    monkeypatch.setattr(roofline, "block_sizes", lambda *_: (4, 8))
    forward = 3 * (384 + 2 * 6144) + 768
    backward = 3 * (384 + 2 * 768 + 6144) + 768 + 1536
    assert roofline.loss_costs("pallas", 12, 16, 24, "cpu") == (4, forward + backward)


def test_the_kernel_moves_less_than_half_the_bytes_of_logits_in_memory() -> None:
    """16 x 1024 tokens of Qwen2.5-3B on a v6e: 9.96 GB of logits."""
    costs = {
        impl: roofline.loss_costs(impl, 16 * 1024, 2048, 151936, "TPU v6 lite")[1]
        for impl in ("full", "jax", "pallas")
    }
    assert costs["pallas"] < min(costs["full"], costs["jax"]) / 2
    assert costs["full"] == pytest.approx(8 * 9.957e9, rel=0.05)


@pytest.mark.parametrize("optimizer, floats", [("adamw", 7), ("lion", 5), ("sgd", 3)])
def test_an_optimizer_reads_and_writes_weights_and_moments_and_reads_gradients(
    optimizer: str, floats: int
) -> None:
    assert roofline.optimizer_work(MODEL, 8, optimizer) == Work(0, floats * 4 * 8944 / 8)
