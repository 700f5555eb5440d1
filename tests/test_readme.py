"""README.md and docs/: what they say about settings, files and exit codes is true of the code."""

import dataclasses
import re
from pathlib import Path

import pytest
from runs import REPO, environment

import config
from infra import settings
from infra.sizes import derive_sizes

pytestmark = pytest.mark.style  # what is true of these pages may not be true of a fork
README = (REPO / "README.md").read_text(encoding="utf-8")
OBJECTIVES = (REPO / "docs" / "objectives.md").read_text(encoding="utf-8")
PAGES = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").glob("*.md"))]
SETTINGS = {field.name.upper(): field for field in dataclasses.fields(config.Config)}


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of each row of the first table below a heading, without the table's head."""
    lines = page.partition(f"# {heading}\n")[2].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_the_table_of_ten_settings_has_their_defaults() -> None:
    rows = table(README, "Settings")
    assert len(rows) == 10
    for name, default, _ in rows:
        text = settings.to_text(SETTINGS[name].default).strip('"')
        assert default == (text or "empty"), name


def test_every_settings_of_an_objective_is_accepted() -> None:
    found = [commands for _, commands, _ in table(OBJECTIVES, "Objectives and their settings")]
    settings = [text for cell in found for text in re.findall(r"`(.*?)`", cell)]
    assert len(settings) == 22 and "the defaults" in found
    for text in settings:
        config.Config.from_env(environment(f"MODEL_PATH=m STEPS=100 {text}"))


def test_the_files_of_the_reading_order_are_those_of_the_code() -> None:
    """The algorithm has ten files."""
    section = README.partition("## Reading order")[2].partition("\n| unit")[0]
    first, then, if_needed = section.split("\n* ")[1:]
    named = {text: re.findall(r"`([\w/]+\.py|\w+/)`", text) for text in (first, then, if_needed)}
    assert len(named[first]) == 10
    everything = sum(named.values(), [])
    assert [name for name in everything if not (REPO / name).exists()] == []
    assert {"infra/", "extras/", "tools/", "model/"} <= {*everything}


def test_the_drawn_step_names_functions_of_the_code() -> None:
    drawing = README.partition("## One step")[2].split("```")[1].strip().splitlines()
    names = [re.match(r"\S+ +(\w+)", line)[1] for line in drawing]
    assert len(drawing) <= 14 and names[:2] == ["update_weights", "prompts_of_round"]
    product = "".join(file.read_text(encoding="utf-8") for file in REPO.glob("*.py"))
    assert [name for name in names if f"def {name}(" not in product] == []


def test_the_examples_of_the_units_are_the_sizes_of_these_settings() -> None:
    text = "ROLLOUT_GLOBAL_BATCH_SIZE=16 NUM_PRE_Q=8 PPO_EPOCHS=2 NUM_MINI_BATCHES=2 BATCH_SIZE=4"
    env = environment(f"{text} TRAIN_MICRO_BATCH_SIZE=16 MODEL_PATH=m")
    sizes = derive_sizes(config.Config.from_env(env), 1, 1)
    assert (sizes.global_batch, sizes.updates_per_step, sizes.passes_per_step) == (128, 4, 4)
    assert sizes.global_batch // 2 == 64 and sizes.grad_accum_steps == 4
    examples = {unit: example for unit, _, example in table(README, "Reading order")}
    assert len(examples) == 9
    assert examples["step"] == "128 sequences (prompt and completion), 4 updates"
    assert examples["pass"] == "BATCH_SIZE=4: 4 passes of 4 prompts"
    assert examples["mini-batch"] == "8 groups, 64 sequences"
    assert examples["micro-step"] == "TRAIN_MICRO_BATCH_SIZE=16: up to 4 an update"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short_its_lines_fit_and_the_links_and_files_that_it_names_exist(
    page: Path,
) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(
        r"`((?:extras|tools|model|infra|tiny|docs|recipes|tests)/\w+\.\w+)`", text
    ):
        assert (REPO / name).exists(), name
    assert len(text.splitlines()) <= (130 if page.name == "README.md" else 150)
    outside_code = re.sub(r"```.*?```", "", text, flags=re.S).splitlines()
    lines = [line for line in outside_code if not line.startswith(("|", "!["))]
    if page.name == "README.md":  # its tables and commands fit, too
        lines = text.splitlines()
    assert max(map(len, lines)) <= 110
