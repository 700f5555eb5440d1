"""The mini-batches of a step, their sizes, and that the devices do not change them."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_sizes import sizes
from test_train import Result, few_examples, finish, start_two, train

import data
import train_grpo
from config import Config
from loss import group_advantages
from models import hf
from rewards import SYSTEM_PROMPT
from rollout import Run
from runtime.mistakes import UserMistake
from runtime.packing import Batch
from startup import set_up
from train_grpo import (
    computed_sequences,
    groups_of_mini_batches,
    to_devices,
    update_policy,
    with_scores,
)
from update import MicroBatch, counts_of, to_batch

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
    """It has 32 sequences, and an update of an eighth of the step 16."""
    assert sizes("1x1", "NUM_MINI_BATCHES=8").micro_batch_size == 4


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
def test_mini_batches_that_do_not_divide_are_refused_with_those_that_do(
    slice_, settings, words
) -> None:
    with pytest.raises(UserMistake) as error:
        sizes(slice_, settings)
    assert words in str(error.value)


# ---- The mini-batches ----------------------------------------------------------------------------


SMALL = "BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=4 TRAIN_MICRO_BATCH_SIZE=8"


def run_of(settings: str, switched_off: str = "") -> Run:
    """A run for which these methods of Config return False."""
    text = f"{SMALL} MODEL_PATH={TINY} DATASET={TINY} {settings}"
    with pytest.MonkeyPatch.context() as patch:
        for name in switched_off.split():
            patch.setattr(Config, name, lambda cfg: False)
        return set_up(Config.from_env(dict(pair.split("=") for pair in text.split())))


@pytest.fixture(
    scope="module",
    params=[("8,1,1", "packs", 4), ("2,1,4", "packs", 1), ("8,1,1", "", 0), ("2,1,4", "", 0)],
    ids=str,
)
def run_and_copies(request: pytest.FixtureRequest) -> tuple[Run, int]:
    """On eight devices, or on pairs of four; and how often a prompt is computed. In padded rows a
    device has one sequence with its prompt, or four sequences with their one prompt. 0 stands for
    packed rows, in which it depends on the lengths."""
    shape, padded, copies = request.param
    # With ENTROPY_COEF no sequence is skipped.
    return run_of(f"MESH_SHAPE={shape} ENTROPY_COEF=0.1", padded), copies


def step_of(masked: int) -> Batch:
    """A step of 8 groups of 4 sequences; every array tells the group or the sequence.

    masked: the sequence of which no token counts.
    """
    sequence = np.arange(32)
    mask = np.ones((32, 3), np.int32)
    mask[masked] = 0
    return Batch(
        prompts=[data.Prompt([group] * 5, {}) for group in range(8)],
        completion_ids=np.repeat(sequence[:, None], 3, axis=1).astype(np.int32),
        completion_mask=mask,
        lengths=np.full(32, 3),
        sampling_logps=np.repeat(sequence[:, None], 3, axis=1).astype(np.float32),
        advantages=sequence.astype(np.float64),
    )


def prompts_on_devices(micro_batches: list[MicroBatch]) -> list[int]:
    """The prompt of each copy of a prompt, sorted; all tokens of a prompt are its number."""
    found = []
    for batch in micro_batches:
        P = batch.ids.shape[1] - batch.targets.shape[1]
        ids, prompt = (np.asarray(x)[:, :P] for x in (batch.ids, batch.prompt))
        found += [*ids[prompt >= 0]]
    assert all(found.count(prompt) % 4 == 0 for prompt in found), "the last token is fed later"
    return sorted(found)[::4]


def sequences_on_devices(micro_batches: list[MicroBatch]) -> list[int]:
    """The number of each sequence that is computed, sorted; each array tells the same."""
    found = []
    for batch in micro_batches:
        places = np.asarray(batch.places)
        ids = np.take_along_axis(np.asarray(batch.targets)[:, None], places, axis=2)  # [X, n, T]
        mask = np.asarray(batch.completion_mask)
        numbers = [*(np.asarray(batch.advantages)[mask[:, 0] > 0])]
        for x in (ids.reshape(mask.shape), np.asarray(batch.sampling_logps)):
            assert [*x[mask > 0]] == [*np.repeat(numbers, 3)]
        found += numbers
    return sorted(found)


def test_every_group_is_in_one_mini_batch_with_all_its_sequences_and_each_has_its_own_counts(
    run_and_copies,
) -> None:
    """A sequence of which no token counts is not computed, but it is one of the sequences."""
    run, copies = run_and_copies
    all_groups = groups_of_mini_batches(run, step=3, epoch=0)
    assert all_groups.shape == (4, 2) and sorted(all_groups.reshape(-1)) == [*range(8)]
    for groups in all_groups:
        mini_batch = step_of(masked=5).groups(groups)
        sequences = (groups[:, None] * 4 + np.arange(4)).reshape(-1)  # [8]
        assert [*mini_batch.advantages] == [*sequences]
        micro_batches = to_devices(run, mini_batch, computed_sequences(run, mini_batch))
        computed = sorted({*sequences} - {5})
        assert sequences_on_devices(micro_batches) == computed
        prompts = prompts_on_devices(micro_batches)
        assert {*prompts} == {*groups}
        if copies:
            assert prompts == ([i // 4 for i in computed] if copies == 4 else sorted(groups))
        tokens = 24 - 3 * (1 in groups)  # sequence 5 is one of group 1
        assert [*counts_of(mini_batch).values()] == [tokens, 8, tokens]
        expected = np.repeat(np.where(sequences == 5, 0, sequences), 3)
        found = to_batch([x.sampling_logps for x in micro_batches], micro_batches, mini_batch)
        assert [*found.reshape(-1)] == [*expected], "results come back to the places of the batch"


def test_the_mini_batches_follow_from_seed_step_and_epoch_alone() -> None:
    run = run_of("SEED=2")
    for epoch in (0, 1):
        order = np.random.default_rng([2, 3, epoch]).permutation(8)
        assert (
            groups_of_mini_batches(run, step=3, epoch=epoch).tolist()
            == order.reshape(4, 2).tolist()
        )


def test_a_single_mini_batch_is_not_shuffled() -> None:
    run = run_of("NUM_MINI_BATCHES=1 TRAIN_MICRO_BATCH_SIZE=32")
    assert groups_of_mini_batches(run, step=3, epoch=1).tolist() == [[*range(8)]]


@pytest.mark.parametrize("n", [1, 4])
def test_old_logps_are_those_before_the_first_update(n: int, monkeypatch) -> None:
    """Here the log-probability of a token is its sequence and 100 for each update before it. Those
    of one mini-batch come from its first update; those of several are scored once, before it."""
    run = run_of(f"NUM_MINI_BATCHES={n} TRAIN_MICRO_BATCH_SIZE=8 PPO_EPOCHS=2")
    scored, updated = [], []

    def score(run, params, batch) -> tuple[np.ndarray, None]:
        scored.append(params)
        return batch.sampling_logps, None

    def one_update(run, state, mini_batch, lr) -> tuple:
        updated.append((mini_batch.advantages, mini_batch.old_logps))
        micro_batches = to_devices(run, mini_batch, computed_sequences(run, mini_batch))
        logps = [batch.sampling_logps + 100 * state.params for batch in micro_batches]
        found = {"loss": 0.0, "grad_norm": 1.0}
        return SimpleNamespace(params=state.params + 1), found, logps, micro_batches

    monkeypatch.setattr(train_grpo, "score", score)
    monkeypatch.setattr(train_grpo, "one_update", one_update)
    before, never = SimpleNamespace(params=0), SimpleNamespace(check=lambda: None)
    batch = with_scores(run, 0, None, step_of(masked=5))
    state, _, metrics = update_policy(run, never, before, batch, 0.1, step=3)
    assert state.params == len(updated) == metrics["updates_applied"] == 2 * n
    assert scored == ([0] if n > 1 else []), "the weights before the first update"
    assert updated[0][1] is None, "each ratio of the first update is 1"
    for sequences, old in updated[1:]:
        assert [*old[sequences != 5, 0]] == [*sequences[sequences != 5]]


# ---- Runs ----------------------------------------------------------------------------------------

# Every metric of a step can differ: a reference, a quantile of the step, both losses.
SETTINGS = dict(
    pair.split("=")
    for pair in """
    STEPS=2 BATCH_SIZE=8 NUM_PRE_Q=4 NUM_MINI_BATCHES=4 PPO_EPOCHS=2 BETA=0.05
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
STEPS, P, K, EPOCHS, LR = 3, 8, 4, 2, 0.05


@pytest.mark.parity
def test_three_steps_of_four_mini_batches_and_two_epochs_equal_torch_in_float64(tmp_path) -> None:
    """SGD, since Adam divides the rounding of small gradients by their size."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "mine.py").write_text(RECORDER)
    text = f"""STEPS={STEPS} BATCH_SIZE={P} NUM_PRE_Q={K} NUM_MINI_BATCHES=4 OPTIMIZER=sgd
        PPO_EPOCHS={EPOCHS} LEARNING_RATE={LR} LR_SCHEDULE=constant WARMUP_RATIO=0 EPS_HIGH=0.05
        EPS_LOW=0.03 MAX_LENGTH_SAMPLE=16 REWARD_WEIGHTS=1
        REWARD_FN={tmp_path}/mine.py:by_length IDS_TO={tmp_path}/ids.jsonl"""
    result = train(tmp_path / "run", **dict(pair.split("=", 1) for pair in text.split()))
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    tokenizer = hf.load_tokenizer(TINY)
    examples = data.load_examples(str(few_examples()), "", "train", "question", "answer")
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
        groups = [x for order in orders for x in order.reshape(4, -1)]
        rows = [[group * K + k for group in x for k in range(K)] for x in groups]
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
