"""docs/metrics.md has the names of metrics.jsonl."""

import functools
import itertools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import REPO, environment, few_examples, train
from small_model import choices_of

from loss import Objective, policy_loss

pytestmark = pytest.mark.style  # what is true of these pages may not be true of a fork
METRICS_PAGE = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
USUAL, UNUSUAL = METRICS_PAGE.split("## Names that need other settings or hardware")
SETTINGS = environment(
    """BATCH_SIZE=2 NUM_PRE_Q=4 BETA=0.04 NUM_MINI_BATCHES=2 DYNAMIC_SAMPLING=1 TOP_K=5
    TOP_ENTROPY_QUANTILE=0.9 EVAL_EVERY_STEPS=1 EVAL_PROMPTS=4 EVAL_FULL_SWEEP=1 EVAL_SAMPLES=2
    SAVE_EVERY_STEPS=0 EXPORT_HF=none MAX_TURNS=2
    REWARD_FN=reward_correct,reward_format,tag_count_reward TEACHER_PATH=tiny"""
)
PHASES = ("train-", "eval/", "eval_full/")
OF_TURNS = {
    f"{phase}turns/{count}"
    for phase in PHASES
    for count in ("number", "drawn_tokens", "environment_tokens")
}
OF_TOP = {"train-other/support/cut_tokens", "train-other/exact_entropy"}
OF_THE_RUN = OF_TOP | OF_TURNS | {"train-other/reverse_kl"}
OF_THE_RUN |= {f"{phase}reward/scored_frac" for phase in PHASES}
OF_SCORER = {
    f"{phase}reward/model/{name}"
    for phase in PHASES
    for name in ("too_long", "too_long_frac", "words_probability")
}
OF_SFT = {"eval/loss", "eval_full/loss", "time/eval/loss_s", "time/eval_full/loss_s"}
OF_OTHER_DEVICES = {"memory/device_peak_gib", "throughput/update/mfu"}
OF_LOSS = ("loss_type", "is_mode")  # the settings on which the names depend
FUNCTIONS = r"/func/(reward_correct|reward_format|tag_count_reward|get_reward|record)/"


def names_of(text: str) -> list[str]:
    """The names in the first column of all tables, each as often as it occurs."""
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]


def recorded_names(tmp_path: Path, **env: str) -> set[str]:
    """The names in the records of a run, as they are on the page."""
    names = {name for record in train(tmp_path / "run", **env).records for name in record}
    names = {re.sub(FUNCTIONS, "/func/NAME/", name) for name in names - {"step"}}
    return {re.sub(r"(pass|maj)_at_\d+$", r"\1_at_K", name) for name in names}


def test_the_usual_names_are_those_of_a_run(tmp_path: Path) -> None:
    for file in few_examples(100, 12).glob("*.jsonl"):
        examples = [json.loads(line) for line in file.read_text().splitlines()]
        for example in examples[::2]:
            example["answer"] = "unknown"  # so that reward_correct does not apply
        (tmp_path / file.name).write_text("\n".join(map(json.dumps, examples)))
    game = f"{REPO}/tests/games.py:Echo"
    recorded = recorded_names(tmp_path, DATASET=str(tmp_path), ENVIRONMENT_CLASS=game, **SETTINGS)
    assert recorded == {*names_of(USUAL)} | OF_THE_RUN
    names = names_of(METRICS_PAGE)
    assert len(names) > 100 and len(names) == len(set(names)), "each once"


def test_the_names_of_supervised_training_are_on_the_page(tmp_path: Path) -> None:
    settings = environment(
        """SCRIPT=train_sft.py COMPLETION_COLUMN=answer BATCH_SIZE=2 MAX_LENGTH_SAMPLE=128
        REWARD_FN= REWARD_WEIGHTS= EVAL_EVERY_STEPS=1 EVAL_FULL_SWEEP=1 SAVE_EVERY_STEPS=0
        EXPORT_HF=none"""
    )
    recorded = recorded_names(tmp_path, DATASET=str(few_examples(100, 12)), **settings)
    assert OF_SFT <= recorded <= {*names_of(METRICS_PAGE)}


def test_the_other_names_are_those_of_all_objectives_and_of_other_devices() -> None:
    x = np.zeros((2, 3), np.float32)
    objective = Objective(
        max_length_sample=3, beta=0.1, entropy_coef=0.1, is_floor=0.5, off_policy_mask_threshold=0.5
    )
    found: set[str] = set()
    for values in itertools.product(*map(choices_of, OF_LOSS)):
        changed = objective._replace(**dict(zip(OF_LOSS, values, strict=True)))
        loss = functools.partial(policy_loss, objective=changed)
        arrays = {"ref_logps": x, "sampling_logps": x, "entropy": x}
        metrics = jax.eval_shape(loss, x, x, x[:, 0], x + 1, 6.0, **arrays)[1]
        found |= {f"train-other/{name}" for name in metrics}
    assert "train-other/is_weight/under_floor" in found
    unusual = {*names_of(UNUSUAL)} - OF_SCORER - OF_SFT - OF_OTHER_DEVICES - OF_THE_RUN
    assert found - {*names_of(USUAL)} == unusual
