#!/usr/bin/env bash
# Runs train_grpo.py on every worker of a Cloud TPU VM, from your machine. ./run_tpu.sh --help
# describes the verbs and the flags, and docs/tpu_vm.md describes the whole procedure.
#
# This script runs on your machine and needs no more than bash 3.2. It calls gcloud through
# tools/run_tpu_gcloud.sh. On each worker it calls tools/run_tpu_worker.sh in the worker's clone.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<'END'
./run_tpu.sh [VERB] [FLAG...] runs train_grpo.py on every worker of a Cloud TPU VM, through gcloud.
On your machine you need gcloud, git and Python 3.10 or newer; the TPU VM needs nothing more.

Verbs (the default is run):
  create, delete   Create or delete the TPU VM. TPU_TYPE is its type, such as v6e-8. TPU_VERSION is
                   its software; the default depends on the type. TPU_SPOT=1 asks for a spot VM.
  setup            Sync, create .venv with Python 3.11 or newer, and install requirements.txt,
                   jax[tpu], TPU_PACKAGES (such as gcsfs), and wandb or sglang-jax if the settings
                   have WANDB_MODE=online or offline, or ROLLOUT_BACKEND=sglang_jax.
  sync [--force]   Check out on every worker the commit that is checked out here. You must have
                   pushed the commit. --force puts files that differ there into git stash.
  env              Copy ./.env, which has WANDB_API_KEY=... and other secrets, to every worker.
  check            Show every worker's user, system, devices in JAX, and versions of packages.
  run              Sync, start the run on every worker and follow the log of worker 0.
  status           Show the newest run of every worker in one line.
  stop             Stop the newest run on every worker.
  logs [-f]        Show the log of the newest run on worker 0 or on --worker N. With -f the log is
                   followed until the run ends.

Flags:
  --config FILE    Read settings from FILE, a file of this repository. The settings of this shell
                   override FILE and are sent to the workers: STEPS=10 ./run_tpu.sh --config FILE.
                   These are the settings of config.py, and variables of libraries that are known
                   to be no secret, such as HF_HOME; docs/tpu_vm.md names them.
  --name NAME      Name the run and its files logs/nohup_NAME_UTC.{log,pid,exit}. The default is
                   the name of FILE.
  --detach         Start the run and do not follow it.
  --restart        When the TPU VM is preempted, create it again and start the same run again.
  --tpu NAME, --zone ZONE, --project ID, --user NAME, --worker all|N, --ref COMMIT
                   Choose the TPU VM, the user who logs in, the workers and the commit. Or set
                   TPU_NAME, ZONE, PROJECT, TPU_USER, WORKER and REF.
  --ssh-flag=F, --strict-host-key-checking=V, --internal-ip, --tunnel-through-iap, --quiet
                   Pass this flag to gcloud. gcloud always gets --quiet, and asks nothing.
  --dry-run        Print the gcloud commands and do not run them.

More variables: TPU_GCLOUD=alpha calls gcloud alpha. The workers clone REPO_URL (default: origin)
without a key into the folder TPU_DIR. Their Python environment is TPU_VENV. SSH_TIMEOUT_S=90 is
the time in seconds for a worker to answer. PYTHON is the Python of your machine.
Exit codes: run and logs -f exit with the run's exit code. 2 means that you made a mistake, 124
that a worker did not answer, 130 Ctrl-C. Any other code is that of gcloud or ssh, or 1.
END
}

# fail MESSAGE: reports a mistake of the user and exits with code 2.
fail() {
  echo "error: $1" >&2
  exit 2
}

# shellcheck source=tools/run_tpu_gcloud.sh
source tools/run_tpu_gcloud.sh

# ---- What the workers get ------------------------------------------------------------------------

# Sets sha, the commit that the workers check out, and url, which they clone.
find_commit() {
  [[ -z $(git diff --name-only HEAD) || -n $REF ]] ||
    fail "commit and push your changes in $(git diff --name-only HEAD | head -3 | xargs) first"
  ! git ls-files --error-unmatch .env >/dev/null 2>&1 ||
    fail ".env is in git; remove it from git with: git rm --cached .env"
  sha=$(git rev-parse --verify --quiet "${REF:-HEAD}^{commit}") ||
    fail "REF=$REF is not a commit of this clone"
  url=${REPO_URL:-$(git remote get-url origin)} || fail "this clone has no remote named origin"
  url=${url/#ssh:\/\/git@/https://}  # The workers have no ssh keys for the repository.
  case $url in
    git@*:*) url=${url#git@} url=https://${url/://} ;;
    *://*@*) fail "REPO_URL or the remote origin has a user or a password in it; remove it" ;;
  esac
  git fetch --quiet origin || fail "git fetch origin fails on this machine"
  [[ -n $(git for-each-ref "--contains=$sha" refs/remotes/origin) ]] ||
    fail "${REF:-HEAD} ($sha) is on no branch of origin; run git push first"
  [[ -z $CONFIG ]] || git cat-file -e "$sha:$CONFIG" 2>/dev/null ||
    fail "--config $CONFIG is not a file of this repository at ${REF:-HEAD}"
  git cat-file -e "$sha:tools/run_tpu_worker.sh" 2>/dev/null ||
    fail "${REF:-HEAD} has no tools/run_tpu_worker.sh, which run_tpu.sh needs; use a newer commit"
}

sync() {
  find_commit
  local output code=0 clone checkout
  clone="[ -d $TPU_DIR/.git ] || git clone --quiet $(printf %q "$url") $TPU_DIR; cd $TPU_DIR"
  clone="$clone; git remote set-url origin $(printf %q "$url"); git fetch --quiet --tags origin"
  # The files that are checked out on a worker may have no tools/run_tpu_worker.sh, or an older
  # one. The worker therefore runs the script of the new commit.
  checkout="worker=\$(git show $sha:tools/run_tpu_worker.sh); bash -c \"\$worker\""
  checkout="$checkout run_tpu_worker.sh sync $sha $force"
  output=$(on_workers "$SSH_TIMEOUT_S" "$WORKER" "set -e; $clone; $checkout" 2>&1) || code=$?
  echo "$output" | grep -v '^error: ' || true
  [[ -z $dry_run ]] || return 0
  if [[ $code != 0 ]]; then
    report_causes "$output" \
      "not every worker of $TPU_NAME has the commit; the workers above have the commit"
  elif [[ $(echo "$output" | sed -n 's/.* HEAD=//p' | sort -u) != "$sha" ]]; then
    fail "the HEADs of the workers above are not all $sha; look at git on the other workers"
  fi
  return "$code"
}

setup() {
  local settings  # those of a run that is started again have more
  read_settings
  sync &&
    on_workers 0 "$WORKER" \
      "$(worker_command setup "$TPU_VENV" "$CONFIG" "${TPU_PACKAGES:-}") $settings"
}

send_env() {
  [[ -f .env ]] || fail "there is no file .env here; copy .env.example, and write your keys in it"
  on_workers "$SSH_TIMEOUT_S" "$WORKER" "cd $TPU_DIR && touch .env && chmod 600 .env" &&
    copy .env "$TPU_DIR/.env" &&
    on_workers "$SSH_TIMEOUT_S" "$WORKER" "$(worker_command env "$TPU_VENV")"
}

# Sets settings: the NAME=value words of this shell that are sent to the run.
read_settings() {
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "PYTHON=$PYTHON must be Python 3.10 or newer, because it reads config.py"
  settings=$("$PYTHON" -c '
import dataclasses, os, shlex, sys
import config
from runtime import parsing

# Of other libraries only names that are known to be no secret: secrets are in .env alone.
OF_LIBRARIES = """HF_HOME HF_ENDPOINT HF_HUB_CACHE HF_HUB_OFFLINE HF_HUB_ENABLE_HF_TRANSFER
    HF_HUB_DOWNLOAD_TIMEOUT HF_HUB_ETAG_TIMEOUT HF_HUB_DISABLE_XET HF_DATASETS_CACHE
    HF_DATASETS_OFFLINE HF_XET_CACHE HF_XET_HIGH_PERFORMANCE TOKENIZERS_PARALLELISM WANDB_ENTITY"""
mistakes = []
known = parsing.read_env(os.environ, config.Config, mistakes)
if mistakes:
    sys.exit("\n".join(f"error: {mistake.text}" for mistake in mistakes))
names = [field.name.upper() for field in dataclasses.fields(config.Config) if field.name in known]
names += [name for name in OF_LIBRARIES.split() if name in os.environ]
home = os.path.expanduser("~") + "/"
for name in names:
    for part in os.environ[name].split(","):  # REWARD_FN is FILE:FUNCTION,FILE:FUNCTION,...
        path = part.partition(":")[0]
        if path.startswith(home) or os.path.isabs(path) and os.path.exists(path):
            print(f"warning: {name} has {path}, a path of this machine; the same path must exist "
                  "on the workers", file=sys.stderr)
print(*[f"{name}={shlex.quote(os.environ[name])}" for name in names])
') || exit 2
}

# ---- A run ---------------------------------------------------------------------------------------

# Starts one run on every worker and sets stamp, the UTC time in the names of its files.
start() {
  local found output code=0
  found=$(describe) || { echo "$found" >&2; return 1; }
  if [[ -n $dry_run ]]; then
    echo "$found"
  elif [[ $found != READY* ]]; then
    echo "error: TPU VM $TPU_NAME is ${found% *}; create it again, or use --restart" >&2
    return 1
  elif [[ $WORKER == all && -z ${REQUIRE_JAX_PROCESS_COUNT:-} && ${found##* } =~ ^[0-9]+$ ]]; then
    settings="$settings REQUIRE_JAX_PROCESS_COUNT=${found##* }"
  fi
  sync || return
  stamp=$(date -u +%Y%m%dT%H%M%SZ)
  output=$(on_workers "$SSH_TIMEOUT_S" "$WORKER" \
    "$(worker_command start "$NAME" "$stamp" "$TPU_VENV" "$CONFIG") $settings" 2>&1) || code=$?
  echo "$output" | grep -v '^error: ' || true
  if [[ $code != 0 ]]; then
    if [[ $output == *' started'* ]]; then
      echo "not every worker of $TPU_NAME has started the run; stopping the workers that have"
      stop "$NAME" "$stamp" || true
    fi
    report_causes "$output" "not every worker of $TPU_NAME has started the run"
  fi
  return "$code"
}

# Prints the log of worker 0 until the run ends, then how the run ended on every worker. Returns
# the exit code of the run.
follow() {
  local code=0 others=0
  echo "following the log of worker ${WORKER/all/0}; after Ctrl-C the run continues: use stop to" \
    "end it, or logs -f to follow it again"
  # Every new connection sends the log from its beginning. Only the lines that are new are printed.
  attach | awk '/^@log begins$/ {n = 0; next} ++n > seen {seen = n; print; fflush()}' || code=$?
  on_workers "$((SSH_TIMEOUT_S + 60))" "$WORKER" "$(worker_command ended "$NAME" "$stamp")" ||
    others=$?
  [[ $code != 0 ]] || code=$others
  return "$code"
}

# stop NAME [UTC]: stops this run on every worker, and waits until it has ended.
stop() {
  local output seconds code=0
  output=$(on_workers "$SSH_TIMEOUT_S" "$WORKER" "$(worker_command stop "$@")") || code=$?
  echo "$output"
  # The workers say how long the run may take to end. PREEMPTION_GRACE_S of the run decides, and
  # this setting may be in the workers' .env.
  seconds=$(echo "$output" | sed -n 's/.* is stopping .* within \([0-9]*\) seconds$/\1/p' |
    sort -n | tail -1)
  if [[ -n $seconds || -n $dry_run ]]; then
    on_workers "$((SSH_TIMEOUT_S + 10 + seconds))" "$WORKER" "$(worker_command stopped "$@")" ||
      code=$?
  fi
  return "$code"
}

# Prints the log. Connects again when ssh fails (exit code 255) while the TPU VM is READY.
attach() {
  local code
  while true; do
    code=0
    on_workers 0 "${WORKER/all/0}" "$(worker_command logs "$NAME" "$stamp")" || code=$?
    [[ $code == 255 && $(describe) == READY* ]] || return "$code"
    sleep "$RETRY_S"
  done
}

run() {
  start || return
  [[ -n $detach ]] || follow
}

# Starts and follows the run, and does so again on a new TPU VM whenever the TPU VM is preempted.
run_on_spot() {
  local code fresh='' waited
  while true; do
    make_ready || return
    code=0
    if [[ -n $fresh ]]; then
      { setup && { [[ ! -f .env ]] || send_env; }; } || code=$?
      [[ $code != 2 ]] || return 2  # A mistake of the user would only repeat itself.
      [[ $code == 0 ]] || { sleep "$RETRY_S"; continue; }
      fresh=''
    fi
    run || code=$?
    [[ $code != 0 && $code != 2 ]] || return "$code"
    echo "the run has failed with exit code $code; looking whether TPU VM $TPU_NAME is preempted"
    # The workers disappear some time before the state of the TPU VM changes.
    for waited in 0 1 2 3; do
      [[ $waited == 0 ]] || sleep "$RETRY_S"
      case $(describe) in
        PREEMPTED* | TERMINATED* | GONE)
          # RESUME=auto continues this run, even if the user started it from another checkpoint.
          [[ $settings == *' RESUME=auto' ]] || settings="$settings RESUME=auto"
          continue 2 ;;
      esac
    done
    return "$code"
  done
}

# ---- The command line ----------------------------------------------------------------------------

TPU_NAME=${TPU_NAME:-} ZONE=${ZONE:-} PROJECT=${PROJECT:-} WORKER=${WORKER:-} REF=${REF:-}
TPU_GCLOUD=${TPU_GCLOUD:-} TPU_USER=${TPU_USER:-} TPU_DIR=${TPU_DIR:-$(basename "$PWD")}
TPU_VENV=${TPU_VENV:-.venv} PYTHON=${PYTHON:-python3}
SSH_TIMEOUT_S=${SSH_TIMEOUT_S:-90} RETRY_S=${RETRY_S:-20}
CONFIG='' NAME='' verb='' detach='' restart='' dry_run='' followed='' force=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --config=* | --name=* | --tpu=* | --user=* | --zone=* | --project=* | --worker=* | --ref=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
  esac
  case $1 in
    create | delete | setup | sync | env | check | run | status | logs | stop)
      [[ -z $verb ]] || fail "give one verb, not both $verb and $1"
      verb=$1 ;;
    --config | --name | --tpu | --user | --zone | --project | --worker | --ref)
      [[ -n ${2:-} ]] || fail "$1 needs a value"
      case $1 in
        --tpu) variable=TPU_NAME ;;
        --user) variable=TPU_USER ;;
        *) variable=$(echo "${1#--}" | tr '[:lower:]' '[:upper:]') ;;
      esac
      printf -v "$variable" %s "$2"
      shift ;;
    --ssh-flag=* | --strict-host-key-checking=* | --internal-ip | --tunnel-through-iap)
      ssh_flags+=("$1") ;;
    --detach) detach=1 ;;
    --restart) restart=1 ;;
    --dry-run) dry_run=1 ;;
    --quiet) ;;
    --force) force=--force ;;
    -f) followed=-f ;;
    -h | --help) usage; exit ;;
    -*) fail "there is no flag $1; see ./run_tpu.sh --help" ;;
    *) fail "there is no verb $1; see ./run_tpu.sh --help" ;;
  esac
  shift
done
verb=${verb:-run}
[[ -z $followed || $verb == logs ]] || fail "-f is a flag of logs only"
[[ -z $force || $verb == sync ]] || fail "--force is a flag of sync only"
[[ -n $TPU_NAME ]] || fail "the name of the TPU VM is missing; set TPU_NAME or --tpu"
command -v gcloud >/dev/null || fail "gcloud is not installed on this machine"
[[ -n $ZONE ]] || ZONE=$(gcloud config get-value compute/zone 2>/dev/null || true)
[[ -n $ZONE ]] || fail "the zone of $TPU_NAME is missing; set ZONE or --zone"
if [[ $verb == run && -z $NAME ]]; then
  NAME=$(basename "${CONFIG:-train_grpo}" .yaml | tr -c 'A-Za-z0-9_.\n-' _)
fi
[[ $NAME != *[!A-Za-z0-9_.-]* ]] || fail "--name may have only letters, digits, _ . and -"
[[ $TPU_USER != *[!A-Za-z0-9_.-]* ]] || fail "--user may have only letters, digits, _ . and -"
[[ $TPU_DIR != *[!A-Za-z0-9_./-]* ]] || fail "TPU_DIR may have only letters, digits, _ . / and -"
[[ $verb != logs ]] || WORKER=${WORKER:-0}
WORKER=${WORKER:-all}
[[ $WORKER == all || $WORKER != *[!0-9]* ]] || fail "--worker must be all or the number of a worker"

case $verb in
  delete) gcloud_tpu 0 delete "$TPU_NAME" ;;
  create | setup | sync) "$verb" ;;
  env) send_env ;;
  check)
    read_settings
    on_workers 0 "$WORKER" "$(worker_command check "$TPU_VENV") $settings"
    ;;
  run)
    [[ -z $restart || -n ${TPU_TYPE:-} ]] || fail "--restart needs TPU_TYPE to create the TPU VM"
    [[ -z $restart || -z $detach ]] || fail "--restart follows the run; remove --detach"
    read_settings
    if [[ -n $restart && -z $dry_run ]]; then run_on_spot; else run; fi
    ;;
  status) on_workers "$SSH_TIMEOUT_S" "$WORKER" "$(worker_command status "$NAME")" ;;
  stop) stop "$NAME" ;;
  logs)
    on_workers 0 "$WORKER" "$(worker_command logs "$NAME" $followed)" | grep -v '^@log begins$'
    ;;
esac
