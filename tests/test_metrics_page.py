"""docs/metrics.md has the names of metrics.jsonl."""

import itertools
import re

import numpy as np
import pytest
from runs import REPO, train
from small_model import choices_of

from loss import Objective, policy_loss

METRICS_PAGE = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
USUAL, UNUSUAL = METRICS_PAGE.split("## Names that need other settings or hardware")
SMALL = {
    "BATCH_SIZE": "2",
    "NUM_PRE_Q": "4",
    "EVAL_EVERY_STEPS": "1",
    "EVAL_PROMPTS": "4",
    "SAVE_EVERY_STEPS": "0",
    "EXPORT_HF": "none",
}
FEW_QUESTIONS = 12  # of the complete split
RUNS = {
    "plain": {},
    "usual": {
        "BETA": "0.04",
        "NUM_MINI_BATCHES": "2",
        "DYNAMIC_SAMPLING": "1",
        "EVAL_FULL_SWEEP": "1",
        "EVAL_SAMPLES": "2",
    },
    "other": {
        "LOSS_TYPE": "cispo",
        "EPS_HIGH": "5",
        "TOP_K": "5",
        "IS_MODE": "token_mask",
        "IS_FLOOR": "0.5",
        "ENTROPY_COEF": "0.01",
    },
}
OF_OTHER_DEVICES = {"memory/device_peak_gib", "throughput/update/mfu"}
OF_LOSS = ("loss_type", "is_mode")  # the settings on which the names depend
FUNCTIONS = r"/func/(reward_correct|reward_format|tag_count_reward|record)/"


def names_of(text: str) -> list[str]:
    """The names in the first column of all tables, each as often as it occurs."""
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]


def as_on_the_page(name: str) -> str:
    name = re.sub(FUNCTIONS, "/func/NAME/", name)
    return re.sub(r"(pass|maj)_at_\d+$", r"\1_at_K", name)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names that each of RUNS has recorded. Later runs find programs of earlier ones."""
    out = tmp_path_factory.mktemp("runs")
    dataset = out / "few"
    dataset.mkdir()
    for split, count in (("train", 100), ("test", FEW_QUESTIONS)):
        lines = (REPO / "tiny" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        (dataset / f"{split}.jsonl").write_text("\n".join(lines[:count]) + "\n")
    found = {}
    for name, more in RUNS.items():
        records = train(out / name, **SMALL, DATASET=str(dataset), **more).records
        found[name] = {as_on_the_page(key) for record in records for key in record}
    return {name: keys - {"step"} for name, keys in found.items()}


def test_the_usual_names_are_those_of_two_runs(recorded: dict[str, set[str]]) -> None:
    assert set(names_of(USUAL)) == recorded["plain"] | recorded["usual"]
    names = names_of(METRICS_PAGE)
    assert len(names) > 100 and len(names) == len(set(names)), "each once"


def test_the_other_names_are_those_of_a_run_with_other_settings_and_of_other_devices(
    recorded: dict[str, set[str]],
) -> None:
    others = recorded["other"] - set(names_of(USUAL))
    assert others == set(names_of(UNUSUAL)) - OF_OTHER_DEVICES


def test_every_metric_of_every_objective_is_on_the_page() -> None:
    names, x = set(names_of(METRICS_PAGE)), np.zeros((2, 3), np.float32)
    found: set[str] = set()
    for loss_type, is_mode in itertools.product(*map(choices_of, OF_LOSS)):
        metrics = policy_loss(
            *(x, x, x[:, 0], x + 1, 6.0),
            ref_logps=x,
            sampling_logps=x,
            entropy=x,
            objective=Objective(
                loss_type=loss_type,
                is_mode=is_mode,
                max_completion_length=3,
                beta=0.1,
                entropy_coef=0.1,
                is_floor=0.5,
            ),
        )[1]
        found |= set(metrics)
    assert {"kl", "cispo_clip_ratio", "is_weight/under_floor"} <= found
    assert {f"train-other/{name}" for name in found} <= names


def test_a_plain_run_has_no_name_that_the_page_gives_to_some_settings_only(
    recorded: dict[str, set[str]],
) -> None:
    tables = METRICS_PAGE.split("| name in `metrics.jsonl` | ")[1:]
    of_some = {x for table in tables if table.startswith("only with") for x in names_of(table)}
    assert {"train-other/kl", "memory/device_peak_gib"} <= of_some
    assert not of_some & recorded["plain"]
