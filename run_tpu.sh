#!/usr/bin/env bash
# Runs train_grpo.py, or another script, on every worker of a Cloud TPU VM, from your machine.
# ./run_tpu.sh --help describes the verbs and the flags, and docs/tpu_vm.md the whole procedure.
#
# This script runs on your machine and needs no more than bash 3.2, git, gcloud and Python 3.10
# without any package. On each worker it calls tools/run_tpu_worker.sh in the worker's clone.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<'END'
./run_tpu.sh [VERB] [FLAG...] runs train_grpo.py on every worker of a Cloud TPU VM, through gcloud.

Verbs (the default is run):
  create, delete   Create or delete the TPU VM. TPU_TYPE is its type, such as v6e-8. TPU_VERSION is
                   its software; the default depends on the type. TPU_SPOT=1 asks for a spot VM.
  setup            Sync, create .venv with Python 3.11 or newer, and install requirements.txt,
                   jax[tpu], TPU_PACKAGES (such as gcsfs), and what the settings REPORT_TO, WANDB_MODE
                   and ROLLOUT_BACKEND ask for.
  sync             Check out on every worker the commit that is checked out here. You must have
                   pushed the commit.
  env              Copy ./.env, which has WANDB_API_KEY=... and other secrets, to every worker.
  check            Show every worker's user, system, devices in JAX, and versions of packages.
  run              Sync, start the run on every worker and follow the log of worker 0.
  status           Show the newest run of every worker in one line.
  stop             Stop the newest run on every worker, and wait until it has saved and ended.
  logs [-f]        Show the log of the newest run on worker 0 or on --worker N. With -f the log is
                   followed until the run ends.

Flags:
  --config FILE    Read settings from FILE, a file of this repository. Settings of this shell win:
                   STEPS=10 ./run_tpu.sh --config FILE. docs/tpu_vm.md says which names are sent.
  --script SCRIPT  Run SCRIPT, such as train_sft.py, in place of train_grpo.py.
  --name NAME      Name the run and its files logs/nohup_NAME_UTC.{log,pid,exit}. The default is
                   the name of FILE, or else of the script.
  --detach         Start the run and do not follow it.
  --tpu NAME, --zone ZONE, --project ID, --user NAME, --worker all|N, --ref COMMIT
                   Choose the TPU VM, the user who logs in, the workers and the commit. Or set
                   TPU_NAME, ZONE, PROJECT, TPU_USER, WORKER and REF.
  --ssh-flag=F, --strict-host-key-checking=V, --internal-ip, --tunnel-through-iap, --quiet
                   Pass this flag to gcloud. gcloud always gets --quiet, and asks nothing.
  --dry-run        Print the gcloud commands and do not run them.
docs/tpu_vm.md has more variables, and the exit codes.
END
}

# fail MESSAGE: reports a mistake of the user and exits with code 2.
fail() {
  echo "error: $1" >&2
  exit 2
}

# ---- Calls of gcloud -----------------------------------------------------------------------------

ssh_flags=()
case "$(uname -s) $(ssh -V 2>&1 || true)" in
  # On Windows gcloud calls plink, whichever ssh is on the PATH.
  MINGW* | MSYS* | CYGWIN*) ;;
  # These are options of OpenSSH alone. With them ssh notices in a minute that a machine is gone.
  *OpenSSH*)
    ssh_flags=(--ssh-flag=-oConnectTimeout=10 --ssh-flag=-oServerAliveInterval=15
      --ssh-flag=-oServerAliveCountMax=2) ;;
esac

# gcloud_tpu VERB ARGUMENT...: calls gcloud compute tpus tpu-vm VERB. With --quiet gcloud asks
# nothing: nobody could answer.
gcloud_tpu() {
  local words=(gcloud ${TPU_GCLOUD:+"$TPU_GCLOUD"} compute tpus tpu-vm "$@" "--zone=$ZONE" --quiet)
  [[ -z $PROJECT ]] || words+=("--project=$PROJECT")
  if [[ -n $dry_run ]]; then
    printf '%q ' "${words[@]}"
    echo
  else
    "${words[@]}" </dev/null
  fi
}

# on_workers WORKERS COMMAND: runs COMMAND on all workers or on one. gcloud retries when a connection
# fails, so COMMAND may run twice on a worker.
on_workers() {
  gcloud_tpu ssh "${TPU_USER:+$TPU_USER@}$TPU_NAME" ${ssh_flags[@]+"${ssh_flags[@]}"} \
    "--worker=$1" "--command=$2"
}

# copy FILE TARGET: copies FILE to the workers as TARGET.
copy() {
  local flags=() flag word
  for flag in ${ssh_flags[@]+"${ssh_flags[@]}"}; do
    case $flag in
      --ssh-flag=*) for word in ${flag#--ssh-flag=}; do flags+=("--scp-flag=$word"); done ;;
      *) flags+=("$flag") ;;
    esac
  done
  gcloud_tpu scp "$1" "${TPU_USER:+$TPU_USER@}$TPU_NAME:$2" ${flags[@]+"${flags[@]}"} \
    "--worker=$WORKER"
}

# worker_command VERB ARGUMENT...: prints the command that runs VERB of run_tpu_worker.sh on a
# worker.
worker_command() {
  echo "cd $TPU_DIR && bash tools/run_tpu_worker.sh$(printf ' %q' "$@")"
}

create() {
  local version
  TPU_TYPE=$(echo "${TPU_TYPE:-}" | tr '[:upper:]' '[:lower:]' | sed 's/^v5e-/v5litepod-/')
  case ${TPU_TYPE:-} in
    '') fail "set TPU_TYPE to the type of the TPU VM, such as v6e-8" ;;
    v6e*) version=v2-alpha-tpuv6e ;;
    v5p*) version=v2-alpha-tpuv5 ;;
    v5*) version=v2-alpha-tpuv5-lite ;;
    *) version=tpu-ubuntu2204-base ;;
  esac
  gcloud_tpu create "$TPU_NAME" "--accelerator-type=$TPU_TYPE" \
    "--version=${TPU_VERSION:-$version}" ${TPU_SPOT:+--spot}
}

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
  git cat-file -e "$sha:$SCRIPT" 2>/dev/null ||
    fail "--script $SCRIPT is not a file of this repository at ${REF:-HEAD}"
}

# Checks out the commit on the workers. Sets workers, the number of workers that have it.
sync() {
  local clone checkout heads code=0
  find_commit
  clone="[ -d $TPU_DIR/.git ] || git clone --quiet $(printf %q "$url") $TPU_DIR; cd $TPU_DIR"
  clone="$clone; git remote set-url origin $(printf %q "$url"); git fetch --quiet --tags origin"
  # The files that are checked out on a worker may have no tools/run_tpu_worker.sh, or an older
  # one. The worker therefore runs the script of the new commit.
  checkout="worker=\$(git show $sha:tools/run_tpu_worker.sh)"
  checkout="$checkout; bash -c \"\$worker\" run_tpu_worker.sh sync $sha"
  heads=$(on_workers "$WORKER" "set -e; $clone; $checkout") || code=$?
  echo "$heads"
  [[ -z $dry_run ]] || return 0
  if [[ $code != 0 ]]; then
    echo "error: not every worker of $TPU_NAME has the commit" >&2
  elif [[ $(echo "$heads" | sed -n 's/.* HEAD=//p' | sort -u) != "$sha" ]]; then
    fail "the HEADs of the workers above are not all $sha; look at git on the other workers"
  fi
  workers=$(echo "$heads" | sort -u | grep -c ' HEAD=') || true
  return "$code"
}

setup() {
  read_settings
  sync &&
    on_workers "$WORKER" \
      "$(worker_command setup "$TPU_VENV" "$CONFIG" "${TPU_PACKAGES:-}") $settings"
}

send_env() {
  [[ -f .env ]] || fail "there is no file .env here; copy .env.example, and write your keys in it"
  on_workers "$WORKER" "cd $TPU_DIR && touch .env && chmod 600 .env" &&
    copy .env "$TPU_DIR/.env" &&
    on_workers "$WORKER" "$(worker_command env "$TPU_VENV")"
}

# Sets settings: the NAME=value words of this shell that are sent to the workers.
read_settings() {
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "PYTHON=$PYTHON must be Python 3.10 or newer, because it reads config.py"
  settings=$("$PYTHON" -c '
import dataclasses, os, shlex, sys
import config
from infra.settings import read_env

# Of other libraries only names that are known to be no secret: secrets are in .env alone.
OF_LIBRARIES = """HF_HOME HF_ENDPOINT HF_HUB_CACHE HF_HUB_OFFLINE HF_HUB_ENABLE_HF_TRANSFER
    HF_HUB_DOWNLOAD_TIMEOUT HF_HUB_ETAG_TIMEOUT HF_HUB_DISABLE_XET HF_DATASETS_CACHE
    HF_DATASETS_OFFLINE HF_XET_CACHE HF_XET_HIGH_PERFORMANCE TOKENIZERS_PARALLELISM WANDB_ENTITY"""
mistakes = []
known = read_env(os.environ, config.Config, mistakes)
if mistakes:
    sys.exit("\n".join(f"error: {line}" for line in mistakes))
names = [field.name.upper() for field in dataclasses.fields(config.Config) if field.name in known]
names += [name for name in OF_LIBRARIES.split() if name in os.environ]
print(*[f"{name}={shlex.quote(os.environ[name])}" for name in names])
') || exit 2
}

# ---- A run ---------------------------------------------------------------------------------------

# Starts one run on every worker and sets stamp, the UTC time in the names of its files.
start() {
  local code=0
  read_settings
  sync || return
  if [[ $WORKER == all && -z $dry_run && -z ${REQUIRE_JAX_PROCESS_COUNT:-} ]]; then
    settings="$settings REQUIRE_JAX_PROCESS_COUNT=$workers"
  fi
  stamp=$(date -u +%Y%m%dT%H%M%SZ)
  # It is exported because the workers of earlier commits take no further argument.
  on_workers "$WORKER" "export SCRIPT=$SCRIPT;\
 $(worker_command start "$NAME" "$stamp" "$TPU_VENV" "$CONFIG") $settings" || code=$?
  if [[ $code != 0 ]]; then
    echo "not every worker of $TPU_NAME has started the run; stopping the workers that have" >&2
    on_workers "$WORKER" "$(worker_command stop "$NAME" "$stamp")" || true
    echo "error: the run was not started; the lines above say why" >&2
  fi
  return "$code"
}

# follow [NAME [UTC]]: prints the log of one worker until the run ends, and returns the exit code of
# the run. Connects again when ssh fails (exit code 255).
follow() {
  local lines=+1 code
  while true; do
    code=0
    on_workers "${WORKER/all/0}" "$(worker_command follow "$lines" "$@")" || code=$?
    [[ $code == 255 ]] || return "$code"
    echo "the connection is lost; connecting again. After Ctrl-C the run continues." >&2
    sleep "$RETRY_S"
    lines=10
  done
}

# Starts the run, follows it, and prints how it ended on every worker.
run() {
  local code=0 others=0
  start || return
  [[ -z $detach ]] || return 0
  echo "following the log of worker ${WORKER/all/0}; after Ctrl-C the run continues: use stop to" \
    "end it, or logs -f to follow it again"
  follow "$NAME" "$stamp" || code=$?
  on_workers "$WORKER" "$(worker_command ended "$NAME" "$stamp")" || others=$?
  [[ $code != 0 ]] || code=$others
  return "$code"
}

# ---- The command line ----------------------------------------------------------------------------

TPU_NAME=${TPU_NAME:-} ZONE=${ZONE:-} PROJECT=${PROJECT:-} WORKER=${WORKER:-} REF=${REF:-}
TPU_GCLOUD=${TPU_GCLOUD:-} TPU_USER=${TPU_USER:-} TPU_DIR=${TPU_DIR:-$(basename "$PWD")}
TPU_VENV=${TPU_VENV:-.venv} PYTHON=${PYTHON:-python3} RETRY_S=${RETRY_S:-20}
CONFIG='' SCRIPT=train_grpo.py NAME='' verb='' detach='' dry_run='' followed=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --config=* | --script=* | --name=* | --tpu=* | --user=* | --zone=* | --project=* | --worker=* | --ref=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
  esac
  case $1 in
    create | delete | setup | sync | env | check | run | status | logs | stop)
      [[ -z $verb ]] || fail "give one verb, not both $verb and $1"
      verb=$1 ;;
    --config | --script | --name | --tpu | --user | --zone | --project | --worker | --ref)
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
    --dry-run) dry_run=1 ;;
    --quiet) ;;
    -f) followed=1 ;;
    -h | --help) usage; exit ;;
    -*) fail "there is no flag $1; see ./run_tpu.sh --help" ;;
    *) fail "there is no verb $1; see ./run_tpu.sh --help" ;;
  esac
  shift
done
verb=${verb:-run}
[[ -n $TPU_NAME ]] || fail "the name of the TPU VM is missing; set TPU_NAME or --tpu"
command -v gcloud >/dev/null || fail "gcloud is not installed on this machine"
[[ -n $ZONE ]] || ZONE=$(gcloud config get-value compute/zone 2>/dev/null || true)
[[ -n $ZONE ]] || fail "the zone of $TPU_NAME is missing; set ZONE or --zone"
if [[ $verb == run && -z $NAME ]]; then
  NAME=$(basename "${CONFIG:-${SCRIPT%.py}}" .yaml | tr -c 'A-Za-z0-9_.\n-' _)
fi
for word in "$NAME" "$SCRIPT" "$TPU_USER" "$TPU_DIR"; do
  [[ $word != *[!A-Za-z0-9_./-]* ]] || fail "'$word' may have only letters, digits, _ . and -"
done
[[ $NAME != */* ]] || fail "--name may have no /"
WORKER=${WORKER:-all}
[[ $WORKER == all || $WORKER != *[!0-9]* ]] || fail "--worker must be all or the number of a worker"

case $verb in
  delete) gcloud_tpu delete "$TPU_NAME" ;;
  create | setup | sync | run) "$verb" ;;
  env) send_env ;;
  check)
    read_settings
    on_workers "$WORKER" "$(worker_command check "$TPU_VENV") $settings" ;;
  status | stop) on_workers "$WORKER" "$(worker_command "$verb" "$NAME")" ;;
  logs)
    if [[ -n $followed ]]; then
      follow "$NAME"
    else
      on_workers "${WORKER/all/0}" "$(worker_command logs "$NAME")"
    fi ;;
esac
