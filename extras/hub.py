"""PUSH_TO_HUB: uploads the export of a run, with a model card, to a repository of the hub.

huggingface_hub reads the token from HF_TOKEN, or from the file that `hf auth login` writes.
"""

import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from huggingface_hub import CommitOperationAdd, HfApi, get_token

from infra.log import read_lines
from infra.mistakes import UserMistake, reading
from infra.resume import SAVED
from infra.settings import REPO, to_text
from model import hf, lora

if TYPE_CHECKING:
    from startup import Run

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")


def raise_if_not_writable(repository: str, private: bool) -> None:
    """Makes the repository if there is none. Raises UserMistake if there is no token, if it may not
    write there, and if a repository of this name is public instead of private, or the reverse."""
    name, api = f"PUSH_TO_HUB={repository}", HfApi()
    if not get_token():
        raise UserMistake(f"{name} needs a token; set HF_TOKEN, or run `hf auth login`")
    with reading(f"{name} needs a token that may write there, and the hub says"):
        api.create_repo(repository, private=private, exist_ok=True)
        # create_repo accepts a repository that the token may only read. An upload begins with this
        # request, which needs the right to write and changes nothing.
        api.preupload_lfs_files(repository, [CommitOperationAdd("README.md", b"#")])
        is_private = bool(api.model_info(repository).private)
    if is_private != private:
        why = f"is a {'private' if is_private else 'public'} repository already"
        change = f"set PUSH_TO_HUB_PRIVATE={int(is_private)}, or change it on the hub"
        raise UserMistake(f"{name} {why}; {change}")


def upload(run: "Run", out: Path, folder: Path) -> None:
    """Uploads the export with a model card, and deletes the repository's files of an earlier model.

    out: the run's folder. folder: that of the export. Raises UserMistake and OSError.
    """
    (out / SAVED).touch()  # without a checkpoint, too, a failure here does not begin the run again
    (folder / "README.md").write_text(model_card(run, out, folder), encoding="utf-8")
    repository, is_private = run.cfg.push_to_hub, run.cfg.push_to_hub_private
    command = ["hf", "upload", repository, str(folder), *["."], *["--private"] * is_private]
    failed = f"PUSH_TO_HUB={repository}: the upload has failed, and {folder} has the export"
    with reading(f"{failed}; start the run again, or upload it with `{shlex.join(command)}`"):
        commit = HfApi().upload_folder(
            repo_id=repository, folder_path=folder, delete_patterns=hf.MODEL_FILES
        )
    print(f"uploaded {folder} to {commit.repo_url}", flush=True)


def model_card(run: "Run", out: Path, folder: Path) -> str:
    """The README.md of the repository; the arguments are those of `upload`."""
    cfg, accuracies = run.cfg, {"eval/accuracy", "eval_full/accuracy"}
    base = lora.read_base_name(run.adapters)[0] if run.adapters else cfg.model_path
    records = [x for x in read_lines(out / "metrics.jsonl") if x.keys() & accuracies]
    settings = {}  # without those of the machine and the records, but with the start of a fork
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        is_of_run = field.metadata["group"] == "run" and field.name != "resume"
        if value != field.default and not is_of_run:
            text = value if isinstance(value, str) else to_text(value)
            settings[field.name.upper()] = shlex.quote(text.replace(f"{REPO}/", ""))
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        cfg=cfg,
        base=base,
        # The hub refuses a card that names a local folder as a model or as a dataset.
        hub_ids=[name for name in (base, cfg.dataset) if not Path(name).exists()],
        is_adapters=(folder / lora.CONFIG).is_file(),
        accuracy_of=run.rollout.functions[0].__name__,
        evaluations=records[:1] + records[1:][-2:],  # the last ones: also of the complete split
        settings=settings,
    )
