"""NUM_MINI_BATCHES: the parts of a step, their sizes, and that the devices do not change them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_sizes import sizes
from test_train import Result, finish, start_two, train

import data
from config import Config
from loss import group_advantages
from models import hf
from rewards import SYSTEM_PROMPT
from run import Run
from runtime.layout import shard_batch
from runtime.mistakes import UserMistake
from runtime.sizes import prompt_share
from startup import set_up
from train_grpo import shuffle_groups
from update import MicroBatch, MiniBatch, count, gather_batch

REPO = Path(__file__).resolve().parent.parent
TINY = REPO / "tiny"

# ---- Sizes ---------------------------------------------------------------------------------------


def test_an_update_has_its_own_micro_steps() -> None:
    found = sizes("1x1", "BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=4 PPO_EPOCHS=2")
    assert found.local_batch == 32 and found.updates_per_step == 8
    assert found.micro_batch_size * found.grad_accum_steps == 8  # two groups of four
    found = sizes("2x4", "BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=4 GRAD_ACCUM_STEPS=2")
    assert (found.micro_batch_size, found.grad_accum_steps, found.updates_per_step) == (4, 2, 4)
    assert found.line().endswith(" train.grad_accum_steps=2 train.updates_per_step=4")


def test_the_micro_batch_of_the_tiny_recipe_gives_way() -> None:
    """It has 64 sequences, and an update of a fourth of the step 32."""
    assert sizes("1x1", "NUM_MINI_BATCHES=4").micro_batch_size == 4


@pytest.mark.parametrize(
    "slice_, settings, words",
    [
        (
            "1x1",
            "BATCH_SIZE=6 NUM_MINI_BATCHES=4",
            "step's 6 prompts evenly; nearest that do: 3, 6",
        ),
        ("2x1", "BATCH_SIZE=2 NUM_MINI_BATCHES=4", "2 prompts on each of 2 processes evenly"),
        (
            "1x8",
            "BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=8",
            "in parts of 2, which fill the local",
        ),
        (
            "1x1",
            "BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=4 TRAIN_MICRO_BATCH_SIZE=16",
            "TRAIN_MICRO_BATCH_SIZE=16 must divide local_batch = passes 1 * BATCH_SIZE 8 * "
            "NUM_PRE_Q 4 = 32 / NUM_MINI_BATCHES 4 = 8; nearest that do: 8",
        ),
    ],
)
def test_parts_that_do_not_divide_are_refused_with_those_that_do(slice_, settings, words) -> None:
    with pytest.raises(UserMistake) as error:
        sizes(slice_, settings)
    assert words in str(error.value)


# ---- The parts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["8,1,1", "2,1,4"])
def run(request: pytest.FixtureRequest) -> Run:
    """On eight devices, which hold a sequence and its prompt each, or in pairs of four, which hold
    four sequences and their one prompt."""
    env = "BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=4 TRAIN_MICRO_BATCH_SIZE=8"
    env += f" MODEL_PATH={TINY} DATASET={TINY} MESH_SHAPE={request.param}"
    return set_up(Config.from_env(dict(pair.split("=") for pair in env.split())))


def step_of(run: Run, masked: int) -> MiniBatch:
    """A step of 8 groups of 4 sequences; every array tells the group or the sequence of a row.

    masked: the sequence of which no token counts.
    """
    sequence = np.arange(32)
    batch_shards = run.training.layout.batch_shards
    copies = 4 // prompt_share(4, 8 // batch_shards)  # of each prompt
    prompts = np.repeat(np.arange(8), copies)
    mask = np.ones((32, 3), np.int32)
    mask[masked] = 0
    arrays = MicroBatch(
        prompt_ids=np.repeat(prompts[:, None], 5, axis=1),
        prompt_mask=np.ones((len(prompts), 5), np.int32),
        completion_ids=np.repeat(sequence[:, None], 3, axis=1),
        completion_mask=mask,
        sampling_logps=np.zeros((32, 3), np.float32),
        advantages=sequence.astype(np.float32),
    )
    pieces = [[None] * 4 if x is None else np.split(x, 4) for x in arrays]
    micro_batches = [
        MicroBatch(*(x if x is None else shard_batch(x, run.training.layout) for x in piece))
        for piece in zip(*pieces, strict=True)
    ]
    return MiniBatch(np.arange(8), micro_batches, count(31 * 3, 32, None))


def test_every_group_is_in_one_part_with_all_its_rows_and_each_part_has_its_own_counts(run) -> None:
    parts = shuffle_groups(run, [step_of(run, masked=5)], step=3, epoch=0)
    assert len(parts) == 4
    for part in parts:
        arrays = gather_batch(part.micro_batches)
        sequences = (part.groups[:, None] * 4 + np.arange(4)).reshape(-1)  # [8]
        assert [*arrays["completion_ids"][:, 0]] == [*arrays["advantages"]] == [*sequences]
        copies = len(arrays["prompt_ids"]) // 2
        assert copies == {8: 4, 2: 1}[run.training.layout.batch_shards]
        assert [*arrays["prompt_ids"][:, 0]] == [*np.repeat(part.groups, copies)]
        tokens = 24 - 3 * (1 in part.groups)  # sequence 5 is one of group 1
        assert part.counts == (tokens, 8, tokens)


def test_the_parts_follow_from_seed_step_and_epoch_alone(run) -> None:
    parts = shuffle_groups(run, [step_of(run, masked=5)], step=3, epoch=0)
    again = shuffle_groups(run, parts, step=3, epoch=1)
    for epoch, found in enumerate((parts, again)):
        order = np.random.default_rng([0, 3, epoch]).permutation(8)
        assert [*np.concatenate([part.groups for part in found])] == [*order]
    arrays = gather_batch(again[2].micro_batches)
    copies = len(arrays["prompt_ids"]) // 2
    assert [*arrays["prompt_ids"][::copies, 0]] == [*again[2].groups]


# ---- Runs ----------------------------------------------------------------------------------------

# Every metric of a step can differ: a reference that follows, a quantile of the step, both losses.
SETTINGS = dict(
    pair.split("=")
    for pair in """
    STEPS=2 BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=4 PPO_EPOCHS=2 BETA=0.05 REF_SYNC_STEPS=5
    TOP_ENTROPY_QUANTILE=0.6 LEARNING_RATE=3e-4 LR_SCHEDULE=constant WARMUP_RATIO=0 EXPORT_HF=none
    EVAL_EVERY_STEPS=0
    """.split()
)


def assert_same(result: Result, expected: Result) -> None:
    assert result.completions == expected.completions
    for ours, theirs in zip(result.records, expected.records, strict=True):
        names = [name for name in theirs if name.startswith(("train-other/", "train-reward/"))]
        names = [n for n in names if "batch_local" not in n and "logp_difference" not in n]
        assert ours["train-other/updates_applied"] == 8
        assert {n: ours[n] for n in names} == pytest.approx(
            {n: theirs[n] for n in names}, rel=1e-4, abs=1e-5
        )


@pytest.mark.slow
def test_micro_batches_devices_and_processes_do_not_change_the_updates(tmp_path) -> None:
    expected = train(tmp_path / "one", **SETTINGS)
    assert expected.records[1]["train-other/clip_ratio_later/region_mean"] > 0
    assert expected.records[1]["train-other/clip_ratio_first/region_mean"] == 0
    assert_same(train(tmp_path / "micro", **SETTINGS, TRAIN_MICRO_BATCH_SIZE="8"), expected)
    assert_same(train(tmp_path / "eight", devices=8, **SETTINGS), expected)
    outs = [tmp_path / "first", tmp_path / "second"]
    both = SETTINGS | {"BATCH_SIZE": "4"}
    started = start_two(outs, 2, **both)
    results = [finish(process, out) for process, out in zip(started, outs, strict=True)]
    assert [result.code for result in results] == [0, 0], results[0].errors
    together = results[0]._replace(completions=expected.completions)
    assert_same(together, expected)
    texts = [pair for result in results for pair in result.completions]
    assert sorted(texts) == sorted(expected.completions)


# ---- A reference in torch ------------------------------------------------------------------------

RECORDER = """
import json
import os
def by_length(completions, completion_ids, **columns):
    with open(os.environ["IDS_TO"], "a") as file:
        file.write(json.dumps(completion_ids) + "\\n")
    return [(sum(ids) % 7) / 7 for ids in completion_ids]
"""
STEPS, P, K, PARTS, EPOCHS, LR = 3, 8, 4, 4, 2, 0.05


@pytest.mark.parity
def test_three_steps_of_four_parts_and_two_epochs_equal_torch_in_float64(tmp_path) -> None:
    """SGD, since Adam divides the rounding of small gradients by their size."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "mine.py").write_text(RECORDER)
    text = f"""STEPS={STEPS} BATCH_SIZE={P} NUM_PRE_Q={K} NUM_MINI_BATCHES={PARTS} OPTIMIZER=sgd
        PPO_EPOCHS={EPOCHS} LEARNING_RATE={LR} LR_SCHEDULE=constant WARMUP_RATIO=0 EPS_HIGH=0.05
        EPS_LOW=0.03 MAX_LENGTH_SAMPLE=16 EXPORT_DTYPE=float32 REWARD_WEIGHTS=1
        REWARD_FN={tmp_path}/mine.py:by_length IDS_TO={tmp_path}/ids.jsonl"""
    result = train(tmp_path / "run", **dict(pair.split("=", 1) for pair in text.split()))
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    tokenizer = hf.load_tokenizer(TINY)
    examples = data.load_examples(str(TINY), "", "train", "question", "answer")
    prompts = data.build_prompts(examples, tokenizer, SYSTEM_PROMPT)
    steps = [json.loads(line) for line in (tmp_path / "ids.jsonl").open()]

    def logps_of(prompt: list[int], ids: list[int]):
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, -1)[torch.arange(len(ids)), ids]

    clipped = 0

    def update(rows: list[int], given: list, sampled: list, A: np.ndarray, old: list) -> tuple:
        """One update on some sequences: its loss, and the norm of its gradient."""
        nonlocal clipped
        tokens, loss = sum(len(sampled[row]) for row in rows), 0.0
        for row in rows:
            ratio = torch.exp(logps_of(given[row], sampled[row]) - old[row])
            within = torch.clamp(ratio, 0.97, 1.05)
            clipped += int((ratio != within).sum())
            loss = loss - torch.minimum(ratio * A[row], within * A[row]).sum() / tokens
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
        return loss.item(), norm.item()

    for step, sampled in enumerate(steps):
        chosen = data.batch_indices(len(prompts), P, step, 0)
        given = [prompts[i].ids for i in chosen for _ in range(K)]
        A = group_advantages(np.array([(sum(ids) % 7) / 7 for ids in sampled]), K)
        with torch.no_grad():
            old = [logps_of(*pair) for pair in zip(given, sampled, strict=True)]
        orders = [np.random.default_rng([0, step, i]).permutation(P) for i in range(EPOCHS)]
        parts = [part for order in orders for part in order.reshape(PARTS, -1)]
        rows = [[group * K + k for group in part for k in range(K)] for part in parts]
        losses, norms = zip(*(update(r, given, sampled, A, old) for r in rows), strict=True)
        record = result.records[step]
        assert record["train-other/loss"] == pytest.approx(np.mean(losses), abs=2e-6)
        assert record["train-other/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert clipped > 100
    ours, moved = load_file(tmp_path / "run" / "hf" / "model.safetensors"), 0.0
    for name, x in model.named_parameters():
        np.testing.assert_allclose(ours[name], x.detach().numpy(), atol=1e-5)
        moved = max(moved, float((x.detach() - before[name]).abs().max()))
    assert moved > 1e-3
