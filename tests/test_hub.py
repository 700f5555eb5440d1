"""PUSH_TO_HUB: what a repository gets, and what a run does if it cannot be written."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import yaml
from runs import REPO, environment, few_examples, run_as_user_here, train_two
from stand_in_hub import READ, Hub, serving

from config import Config
from extras.hub import open_repository
from infra.mistakes import Unwritable, UserMistake
from model.params import init_params
from run import Run
from startup import export, first_params, set_up

BASE = {"DATASET": str(REPO / "tiny" / "test.jsonl"), "PUSH_TO_HUB": "me/model", "BATCH_SIZE": "2"}
RECORDS = [
    {"step": 0, "eval/accuracy": 0.25, "eval/accuracy_se": 0.0625, "eval/questions_global": 48},
    {"step": 0, "train-other/loss": 0.5},
    {"step": 5, "eval/accuracy": 0.5, "eval/accuracy_se": None, "eval/questions_global": 48},
    {"step": 9, "eval/accuracy": 0.75, "eval/accuracy_se": 0.06, "eval/questions_global": 48},
    {
        "step": 9,
        "eval_full/accuracy": 0.71994,
        "eval_full/accuracy_se": 0.02,
        "eval_full/questions_global": 500,
    },
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub for this process and for those that it starts."""
    with serving() as server:
        for name, value in server.env(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        constants = {  # huggingface_hub has read the environment when it was imported
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
            "HF_TOKEN_PATH": str(tmp_path / "no token"),
        }
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield server


def finished_run(out: Path, **settings: str) -> Run:
    """A run with the records RECORDS in its folder, which is ready for its export."""
    out.mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (out / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return set_up(Config.from_env(BASE | settings))


def random_params(run: Run) -> object:
    return init_params(run.learner.compute.model, jax.random.key(0))


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of an export, without the one that names a folder of this machine."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if path.name != "exported_from.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [grpo]
---
# model
`tiny`, trained with GRPO on the split `train` of `tiny/test.jsonl`.

## Accuracy
It is the accuracy of `reward_correct` on questions of the split `test`, after these numbers of \
steps.

| steps | questions | accuracy | standard error |
|---|---|---|---|
| 0 | 48 | 0.2500 | 0.0625 |
| 9 | 48 | 0.7500 | 0.0600 |
| 9 | 500 | 0.7199 | 0.0200 |

## Settings
`python train_grpo.py --config settings.yaml` repeats the run, with these lines in `settings.yaml`:
"""


def test_the_repository_gets_the_files_of_the_export_and_a_card_with_the_numbers_of_the_run(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path / "run", OUTPUT_DIR=str(tmp_path / "run"), SEED="7")
    assert list(hub.files["me/model"]) == [".gitattributes"] and hub.private["me/model"]
    hub.files["me/model"]["adapter_config.json"] = b"{}"  # of an earlier model
    mine = {"notes.md": b"mine", "onnx/config.json": b"{}"}
    hub.files["me/model"] |= mine
    secrets = tmp_path / "run" / "hf" / ".env"
    secrets.parent.mkdir()
    secrets.write_text("WANDB_API_KEY=0")
    export(run, tmp_path / "run", random_params(run))
    secrets.unlink()
    exported, uploaded = files_of(tmp_path / "run" / "hf"), hub.files["me/model"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= exported.keys()
    assert uploaded == exported | mine | {".gitattributes": uploaded[".gitattributes"]}
    card, _, settings = exported["README.md"].decode().partition("\n```yaml\n")
    assert card == CARD
    settings, _, rest = settings.partition("```\n")
    assert rest == ""
    # The settings of the card give the run again, without the folders of this machine.
    (tmp_path / "settings.yaml").write_text(settings, encoding="utf-8")
    again = Config.from_env({}, tmp_path / "settings.yaml")
    local = {
        "output_dir": "",
        "push_to_hub": "",
        "model_path": "tiny",
        "dataset": "tiny/test.jsonl",
    }
    assert again == dataclasses.replace(run.cfg, **local)
    assert f"\nuploaded {tmp_path}/run/hf to me/model on the hub\n" in capsys.readouterr().out


def test_a_card_names_ids_of_the_hub_and_no_folders(hub: Hub, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", LORA_RANK="2")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    cfg = dataclasses.replace(run.cfg, model_path="org/base", dataset="openai/gsm8k")
    export(dataclasses.replace(run, cfg=cfg), tmp_path / "run", random_params(run))
    head, body = hub.files["me/model"]["README.md"].decode().split("---\n")[1:]
    assert yaml.safe_load(head) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["grpo"],
        "base_model": "org/base",
        "datasets": ["openai/gsm8k"],
    }
    assert "\nAdapters (LoRA) for `org/base`, trained with GRPO on the split `train` of" in body
    assert "\nThe run had no evaluation.\n" in body


def test_a_failed_upload_keeps_the_export_and_its_line_has_the_command(
    hub: Hub, tmp_path: Path
) -> None:
    run = finished_run(tmp_path / "run", PUSH_TO_HUB_PRIVATE="0")
    assert not hub.private["me/model"]
    folder, params, hub.commit_status = tmp_path / "run" / "hf", random_params(run), 507
    with pytest.raises(Unwritable) as error:
        export(run, tmp_path / "run", params)
    begins = f"PUSH_TO_HUB=me/model: the upload has failed, and {folder} has the export; upload it "
    begins += f"with `hf upload me/model {folder} . '--include=*.json' '--include=*.safetensors' "
    line = str(error.value)
    assert line.startswith(begins) and "507" in line and "\n" not in line
    assert (tmp_path / "run" / ".saved").exists()  # the run is not begun again
    assert {"model.safetensors", "README.md"} <= files_of(folder).keys()
    hub.commit_status = 200
    export(run, tmp_path / "run", params)
    assert hub.files["me/model"].items() >= files_of(folder).items()


def test_a_repository_that_cannot_be_written_is_a_line_before_the_first_step(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_repository("me/model", private=True)
    open_repository("me/model", private=True)  # it exists now
    table = {
        ("hf_writes", "me/model", False): "is a private repository already; change that, or set",
        ("hf_writes", "you/model", True): "cannot be written, and the hub says: .*Forbidden",
        # create_repo of huggingface_hub would accept this one.
        (READ, "me/model", True): "cannot be written, and the hub says: .*preupload/main",
        ("hf_x", "me/model", True): "cannot be written, and the hub says: .*401",
        ("", "me/model", True): "needs a token; set HF_TOKEN, or run `hf auth login`",
    }
    for (token, repository, private), words in table.items():
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UserMistake, match=f"^PUSH_TO_HUB={repository} {words}") as error:
            open_repository(repository, private)
        assert "\n" not in str(error.value) and (token or "-") not in str(error.value)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # no server
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    with pytest.raises(UserMistake, match="^PUSH_TO_HUB=me/model cannot be written, and the hub"):
        open_repository("me/model", private=True)


# ---- Real runs -----------------------------------------------------------------------------------

SHORT = environment(
    """STEPS=2 BATCH_SIZE=2 NUM_PRE_Q=4 TRAIN_MICRO_BATCH_SIZE=8 MAX_LENGTH_SAMPLE=32 SEED=1
    LEARNING_RATE=1e-3 EVAL_EVERY_STEPS=2 EVAL_PROMPTS=40 SAVE_EVERY_STEPS=1 PUSH_TO_HUB=me/model"""
)


def rows_of(records: list[dict]) -> list[str]:
    return [
        f"| {x['step']} | 40 | {x['eval/accuracy']:.4f} | {x['eval/accuracy_se']:.4f} |"
        for x in records
        if "eval/accuracy" in x
    ]


@pytest.mark.slow
def test_the_same_command_goes_on_to_an_upload_that_has_failed(hub: Hub, tmp_path: Path) -> None:
    settings = SHORT | {"DATASET": str(few_examples())}
    out = tmp_path / "run"
    refused = run_as_user_here(out, **settings | {"HF_TOKEN": ""})
    assert refused.code == 2 and refused.errors.count("\n") == 1 and not refused.records
    hub.commit_status = 507
    failed = run_as_user_here(out, **settings)
    last = failed.errors.splitlines()[-1]
    assert failed.code == 1 and last.startswith(
        "error: PUSH_TO_HUB=me/model: the upload has failed"
    )
    assert "DONE" not in failed.lines and "hf_writes" not in failed.lines + failed.errors
    assert f"`hf upload me/model {out}/hf . '--include=*.json' " in last
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert (summary["state"], summary["steps_done"]) == ("failed", 2)
    hub.commit_status = 200
    done = run_as_user_here(out, **settings)
    assert done.code == 0 and "\nresumed after 2 of 2 steps\n" in done.lines, done.errors
    assert done.records == failed.records
    files = hub.files["me/model"]
    assert files.items() >= files_of(out / "hf").items() and hub.private["me/model"]
    rows = rows_of(done.records)
    assert len(rows) == 2 and "\n".join(rows) in files["README.md"].decode()
    asked = run_as_user_here(out, "--ask", "1+2?", HF_TOKEN="")  # it uploads nothing
    assert asked.code == 0, asked.errors


@pytest.mark.slow
def test_two_processes_begin_with_an_uploaded_model_and_upload_their_adapters_once(
    hub: Hub, tmp_path: Path
) -> None:
    """A run evaluates the adapters from there."""
    run = finished_run(tmp_path / "run")
    export(run, tmp_path / "run", first_params(run, "float32"))
    hub.commit_s, earlier = 5, len(hub.requests)
    settings = SHORT | {"DATASET": str(few_examples()), "STEPS": "1", "EVAL_EVERY_STEPS": "1"}
    settings |= {"MODEL_PATH": "me/model", "LORA_RANK": "2", "PUSH_TO_HUB": "team/adapters"}
    both = train_two(tmp_path, 1, **settings)
    assert [("\nuploaded " in result.lines) for result in both] == [True, False]
    assert all("\nDONE: steps=1 " in result.lines for result in both)
    for request in ("/commit/main", "/repos/create"):
        assert sum(request in line for line in hub.requests[earlier:]) == 1
    files = hub.files["team/adapters"]
    assert files.items() >= files_of(tmp_path / "0" / "hf").items()
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "me/model"
    assert "base_model: me/model\n" in files["README.md"].decode()
    again = {"MODEL_PATH": "team/adapters", "STEPS": "0", "PUSH_TO_HUB": ""}
    evaluated = run_as_user_here(tmp_path / "evaluated", **settings | again)
    assert evaluated.code == 0 and "\nlora rank=2 " in evaluated.lines, evaluated.errors
    assert rows_of(evaluated.records)[0][4:] == rows_of(both[0].records)[-1][4:]
