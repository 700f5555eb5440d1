"""PUSH_TO_HUB: uploads the export of a run, with a model card, to a repository of the hub.

huggingface_hub reads the token from HF_TOKEN, or from the file that `hf auth login` writes.
"""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from huggingface_hub import CommitOperationAdd, HfApi, get_token

from infra.log import read_lines
from infra.mistakes import UserMistake, reading
from infra.resume import SAVED
from infra.settings import REPO, yaml_lines
from model import hf, lora

if TYPE_CHECKING:
    from startup import Run

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
# The changed settings of a run, without those of its machine and its records.
SETTING = re.compile(r"(?!run\.(?!resume|export_lora)).*\[changed from ")


def raise_if_not_writable(repository: str, private: bool) -> None:
    """Makes the repository if there is none. Raises UserMistake if there is no token, if it may not
    write there, and if a repository of this name is public instead of private, or the reverse."""
    name, api = f"PUSH_TO_HUB={repository}", HfApi()
    if not get_token():
        raise UserMistake(f"{name} needs a token; set HF_TOKEN, or run `hf auth login`")
    with reading(f"{name} cannot be written, and the hub says"):
        api.create_repo(repository, private=private, exist_ok=True)
        # create_repo accepts a repository that the token may only read. An upload begins with this
        # request, which needs the right to write and changes nothing.
        api.preupload_lfs_files(repository, [CommitOperationAdd("README.md", b"#")])
        is_private = bool(api.model_info(repository).private)
    if is_private != private:
        why = f"is a {'private' if is_private else 'public'} repository already"
        raise UserMistake(f"{name} {why}; change that, or set PUSH_TO_HUB_PRIVATE={is_private:d}")


def upload(run: "Run", out: Path, folder: Path) -> None:
    """Uploads the export with a model card, and deletes the repository's files of an earlier model.

    out: the run's folder. folder: that of the export. Raises UserMistake and OSError.
    """
    (out / SAVED).touch()  # without a checkpoint, too, a failure here does not begin the run again
    (folder / "README.md").write_text(model_card(run, out, folder), encoding="utf-8")
    repository, flags = run.cfg.push_to_hub, ["--private"] * run.cfg.push_to_hub_private
    command = shlex.join(["hf", "upload", repository, str(folder), ".", *flags])
    failed = f"PUSH_TO_HUB={repository}: the upload has failed, and {folder} has the export"
    with reading(f"{failed}; start the run again, or upload it with `{command}`"):
        commit = HfApi().upload_folder(
            repo_id=repository, folder_path=folder, delete_patterns=hf.MODEL_FILES
        )
    print(f"uploaded {folder} to {commit.repo_url}", flush=True)


def model_card(run: "Run", out: Path, folder: Path) -> str:
    """The README.md of the repository; the arguments are those of `upload`."""
    cfg, records = run.cfg, read_lines(out / "metrics.jsonl")
    evaluations = [x for x in records if x.keys() & {"eval/accuracy", "eval_full/accuracy"}]
    base = lora.read_base_name(run.adapters)[0] if run.adapters else cfg.model_path
    template = TEMPLATE.read_text(encoding="utf-8")
    text = jinja2.Template(template, trim_blocks=True, lstrip_blocks=True).render(
        cfg=cfg,
        base=base,
        # The hub refuses a card that names a local folder as a model or as a dataset.
        hub_ids=[name for name in (base, cfg.dataset) if not Path(name).exists()],
        is_adapters=(folder / lora.CONFIG).is_file(),
        accuracy_of=run.rollout.functions[0].__name__,
        evaluations=evaluations[:1] + evaluations[1:][-2:],  # and that of the complete split
        settings=[line for line in yaml_lines(cfg) if SETTING.match(line)],
    )
    return text.replace(f"{REPO}/", "") + "\n"
