#!/usr/bin/env python3
"""A `gcloud` for tests: a TPU VM whose workers are folders and whose processes are real.

It understands `gcloud compute tpus tpu-vm VERB ...` as run_tpu.sh calls it. The folder $CLOUD is
the TPU VM. The file `state` has its state, and without this file there is no TPU VM. `worker0` and
`worker1` are the home folders of the workers. `environ.json` has the environment variables of their
processes. `calls` gets every command line. `faults.json` makes commands fail:
[[worker, a part of the command, "fail" | "again" | "mistake"], ...].
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CLOUD = Path(os.environ["CLOUD"])
HOSTS = 2


def environment(worker: int) -> dict[str, str]:
    """The environment of a login on a worker.

    Of the caller's variables it has only those with which programs are found.
    """
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG")}
    home = CLOUD / f"worker{worker}"
    login = {"HOME": str(home), "HOSTNAME": f"worker-{worker}", "JAX_PROCESS_ID": str(worker)}
    return kept | login | json.loads((CLOUD / "environ.json").read_text())


def on_worker(worker: int, command: str) -> int:
    """Runs the command on one worker, or breaks it, and returns its exit code."""
    faults = json.loads((CLOUD / "faults.json").read_text())
    kinds = [kind for where, part, kind in faults if where == worker and part in command]
    if "fail" in kinds:
        print("ssh: connect to host: Connection refused", file=sys.stderr)
        return 255
    if "mistake" in kinds:
        print(f"error: worker-{worker}: this will not do", file=sys.stderr)
        return 2
    place = {"cwd": home(worker), "env": environment(worker)}
    if "again" in kinds:  # The connection breaks after the command, and gcloud retries.
        subprocess.run(["bash", "-c", command], **place)
    return subprocess.run(["bash", "-c", command], **place).returncode


def home(worker: int) -> Path:
    return CLOUD / f"worker{worker}"


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "alpha"]
    with (CLOUD / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    assert words[:3] == ["compute", "tpus", "tpu-vm"], words
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("names", nargs="+")
    for flag in ("zone", "project", "worker", "command", "format", "accelerator-type", "version"):
        parser.add_argument(f"--{flag}")
    parser.add_argument("--ssh-flag", action="append")
    parser.add_argument("--scp-flag", action="append")
    for flag in ("quiet", "spot"):
        parser.add_argument(f"--{flag}", action="store_true")
    args = parser.parse_args(words[3:])
    assert args.zone, "no zone"
    assert args.quiet or args.verb == "describe", "a question would find nobody to answer it"
    logs_in = args.verb in ("ssh", "scp")
    assert logs_in or args.names == ["mine"], f"no TPU VM {args.names}; only ssh and scp log in"
    state = CLOUD / "state"

    if args.verb == "create":
        scarce = CLOUD / "scarce"  # How many more times create fails for lack of capacity.
        if scarce.exists() and int(scarce.read_text()):
            scarce.write_text(str(int(scarce.read_text()) - 1))
            print("ERROR: There is no more capacity in the zone", file=sys.stderr)
            return 1
        for worker in range(HOSTS):
            home(worker).mkdir()
        state.write_text("READY")
        return 0
    if not state.exists():
        print("ERROR: (gcloud.compute.tpus.tpu-vm) NOT_FOUND", file=sys.stderr)
        return 1
    if args.verb == "describe":
        print(state.read_text())
        return 0
    if args.verb == "delete":
        for worker in range(HOSTS):
            shutil.rmtree(home(worker))
        state.unlink()
        return 0
    if state.read_text() != "READY":
        print(f"ERROR: TPU VM is {state.read_text()}", file=sys.stderr)
        return 1
    workers = range(HOSTS) if args.worker == "all" else [int(args.worker)]
    if args.verb == "scp":
        source, target = args.names
        for worker in workers:
            file = home(worker) / target.partition(":")[2]
            file.write_bytes(Path(source).read_bytes())  # as scp does, which keeps a file's mode
        return 0
    assert args.verb == "ssh", args.verb
    with ThreadPoolExecutor() as pool:
        codes = [*pool.map(lambda worker: on_worker(worker, args.command), workers)]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
