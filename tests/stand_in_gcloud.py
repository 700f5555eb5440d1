#!/usr/bin/env python3
"""A `gcloud` for tests: a TPU VM whose workers are folders and whose processes are real.

It understands `gcloud compute tpus tpu-vm VERB ...` as run_tpu.sh calls it. The folder $CLOUD is
the TPU VM. The file `state` has its state, and without this file there is no TPU VM. `worker0` and
`worker1` are the home folders of the workers. `environ.json` has the environment variables of their
processes. `calls` gets every command line. `faults.json` makes commands fail:
[[worker, a part of the command, "fail" | "hang" | "again" | "mistake"], ...]. Every call prints a
warning and a notice on stderr, as the real gcloud may do, whether the call succeeds or fails.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

CLOUD = Path(os.environ["CLOUD"])
HOSTS = 2
WARNING = "WARNING: Your project is not the quota project; a resource may be NOT_FOUND for it."
NOTICE = "Updates are available for some Google Cloud CLI components."


def environment(worker: int) -> dict[str, str]:
    """The environment of a login on a worker.

    Of the caller's variables it has only those with which programs and packages are found.
    """
    kept = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k in ("PATH", "LANG")}
    home = CLOUD / f"worker{worker}"
    login = {"HOME": str(home), "HOSTNAME": f"worker-{worker}", "JAX_PROCESS_ID": str(worker)}
    shared, *each = json.loads((CLOUD / "environ.json").read_text())
    return kept | login | shared | (each[worker] if each else {})


def on_worker(worker: int, command: str, codes: dict[int, int]) -> None:
    """Runs the command on one worker, or breaks it, and puts its exit code into `codes`."""
    faults = CLOUD / "faults.json"
    for where, part, kind in json.loads(faults.read_text()) if faults.exists() else []:
        if where == worker and part in command:
            if kind == "hang":  # The real gcloud waits for a process too: ssh.
                subprocess.run(["sleep", "3600"])
            if kind == "fail":
                print("ssh: connect to host: Connection refused", file=sys.stderr)
                codes[worker] = 255
                return
            if kind == "mistake":
                print(f"error: worker-{worker}: this will not do", file=sys.stderr)
                codes[worker] = 2
                return
            if kind == "again":  # The connection breaks after the command, and gcloud retries.
                subprocess.run(["bash", "-c", command], cwd=home(worker), env=environment(worker))
    done = subprocess.run(["bash", "-c", command], cwd=home(worker), env=environment(worker))
    codes[worker] = done.returncode


def home(worker: int) -> Path:
    return CLOUD / f"worker{worker}"


def end_everything() -> None:
    """Kills all runs, as when the machines are taken away."""
    for file in CLOUD.glob("worker*/*/logs/*Z.pid"):
        try:
            if os.getsid(int(file.read_text())):
                os.killpg(os.getpgid(int(file.read_text())), signal.SIGKILL)
        except ProcessLookupError:
            continue


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
    assert args.quiet, "a question would find nobody to answer it"
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
        found = state.read_text()
        print(f"{found}\t{HOSTS}" if found == "READY" else found)
        return 0
    if args.verb == "delete":
        end_everything()
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
            file.write_bytes(
                Path(source).read_bytes()
            )  # With scp, too, an existing file keeps its mode.
        return 0
    assert args.verb == "ssh", args.verb
    print(f"Using ssh batch size of 1, for {len(workers)} workers.", file=sys.stderr)
    for worker in workers:
        print(f"SSH: Attempting to connect to worker {worker}...", file=sys.stderr)
    codes: dict[int, int] = {}
    threads = [threading.Thread(target=on_worker, args=(w, args.command, codes)) for w in workers]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join()
    return next((code for _, code in sorted(codes.items()) if code), 0)


if __name__ == "__main__":
    print(WARNING, file=sys.stderr, flush=True)
    exit_code = main()
    print(NOTICE, file=sys.stderr)
    sys.exit(exit_code)
