"""PUSH_TO_HUB: uploads the export of a run, with a model card, to a repository of the hub."""

import os
import shlex
from fnmatch import fnmatch
from pathlib import Path

import jinja2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

from config import yaml_lines
from infra.log import read_lines
from infra.mistakes import UserMistake, reading
from infra.resume import SAVED
from infra.settings import REPO
from model import hf, lora
from run import Run

PATTERNS = (*hf.MODEL_FILES, "*.txt", "README.md")  # of what is uploaded


def open_repository(repo_id: str, private: bool) -> None:
    """Creates the repository if there is none. Raises UserMistake if the token cannot write to it,
    and if it is public and should be private, or the reverse."""
    name, api = f"PUSH_TO_HUB={repo_id}", HfApi()
    if not get_token():
        raise UserMistake(f"{name} needs a token; set HF_TOKEN, or run `hf auth login`")
    with reading(f"{name} cannot be written, and the hub says"):
        api.create_repo(repo_id, private=private, exist_ok=True)
        # create_repo accepts a repository that the token can only read. The first request of an
        # upload needs the right to write, and changes nothing.
        api.preupload_lfs_files(repo_id, [CommitOperationAdd("README.md", b"#")])
        is_private = bool(api.model_info(repo_id).private)
    if is_private != private:
        reason = f"is a {'private' if is_private else 'public'} repository already"
        raise UserMistake(
            f"{name} {reason}; change that, or set PUSH_TO_HUB_PRIVATE={is_private:d}"
        )


def upload(run: Run, out: Path, folder: Path) -> None:
    """Uploads the export in `folder` with a model card, in place of the model in the repository.
    Other files there, and other files of the folder, stay where they are.

    out: the run's folder. Raises UserMistake and OSError.
    """
    (out / SAVED).touch()  # without a checkpoint, too, a failure here does not begin the run again
    (folder / "README.md").write_text(model_card(run, out, folder), encoding="utf-8")
    files = [path for pattern in PATTERNS for path in folder.glob(pattern)]
    files += (folder / hf.TEMPLATES).glob("*.jinja")
    added = {str(path.relative_to(folder)): path for path in files if path.name != hf.EXPORTED}
    repo_id, api = run.cfg.push_to_hub, HfApi()
    includes = [f"--include={pattern}" for pattern in PATTERNS]
    command = shlex.join(["hf", "upload", repo_id, str(folder), ".", *includes])
    failed = f"PUSH_TO_HUB={repo_id}: the upload has failed, and {folder} has the export"
    advice = "with a checkpoint the same command of the run uploads it, too"
    with reading(f"{failed}; upload it with `{command}` ({advice})"):
        old_files = [x for x in api.list_repo_files(repo_id) if x not in added and "/" not in x]
        replaced = [x for x in old_files if any(fnmatch(x, pattern) for pattern in hf.MODEL_FILES)]
        operations: list = [CommitOperationAdd(name, path) for name, path in added.items()]
        operations += [CommitOperationDelete(name) for name in replaced]
        api.create_commit(repo_id, operations, commit_message="Trained with GRPO")
    print(f"uploaded {folder} to {repo_id} on the hub", flush=True)


def model_card(run: Run, out: Path, folder: Path) -> str:
    """The README.md of the repository. out, folder: as in `upload`."""
    records = read_lines(out / "metrics.jsonl")
    template = Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8")
    text = jinja2.Template(template, trim_blocks=True, lstrip_blocks=True).render(
        run=run,
        folder=folder,
        exists=os.path.exists,
        base=lora.read_base_name(run.adapters)[0] if run.adapters else run.cfg.model_path,
        evaluations=[x for x in records if x.keys() & {"eval/accuracy", "eval_full/accuracy"}],
        settings=yaml_lines(run.cfg),
    )
    return text.replace(f"{REPO}/", "") + "\n"
