#!/usr/bin/env bash
# From your own machine to every worker of a Cloud TPU VM: ./run_tpu.sh --help
#
# This file runs where you are (bash 3.2 will do) and calls gcloud by tools/run_tpu_gcloud.sh. What it
# calls on the workers is tools/run_tpu_worker.sh, from their own clone.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<'END'
./run_tpu.sh [VERB] [FLAG...]: train_grpo.py on every worker of a Cloud TPU VM, through gcloud

  create, delete   the TPU VM: TPU_TYPE (say v6e-8), TPU_VERSION (goes by the type), TPU_SPOT=1
  setup            clone, make a Python >= 3.11 .venv, install requirements.txt and jax[tpu] there,
                   and TPU_PACKAGES (say wandb)
  sync [--force]   check out, on every worker, the commit that is checked out here and pushed;
                   --force puts what differs there into git stash
  env              copy ./.env there (WANDB_API_KEY=..., HF_TOKEN=...), readable by you alone
  check            every worker's system, and what JAX sees there: processes, devices, versions
  run              sync, start on every worker, follow worker 0, exit with the run's own code
  status, stop     of the newest run, on every worker       (run is what happens without a VERB)
  logs [-f]        of the newest run, on worker 0 or --worker N; -f goes on until it ends

  --config FILE    settings, a file of this repository; those set in this shell go over it and
                   are forwarded (those of config.py, HF_*, TOKENIZERS_PARALLELISM, WANDB_ENTITY;
                   a name ending in TOKEN, KEY or SECRET never): STEPS=10 ./run_tpu.sh --config FILE
  --name NAME      of the run and its logs/nohup_NAME_UTC.{log,pid,exit}; else as FILE is called
  --detach         do not follow
  --restart        when the TPU VM is preempted make it anew and start the same run again
  --tpu NAME, --zone ZONE, --project ID, --user NAME, --worker all|N, --ref COMMIT
                   which TPU VM, who logs in, on which of its workers, what to check out there
                   (or TPU_NAME, ZONE, PROJECT, TPU_USER, WORKER, REF)
  --ssh-flag=F, --strict-host-key-checking=V, --internal-ip, --tunnel-through-iap   as gcloud's
  --dry-run        print the commands, run none
  Besides: TPU_GCLOUD=alpha (gcloud alpha), REPO_URL (to clone from), TPU_DIR (the clone's folder
  there), SSH_TIMEOUT_S=90 (for a worker to answer), PYTHON (>= 3.10 here), TPU_VENV (there).
Exit codes: the run's own; 2 a mistake; 1 anything else.
END
}

fail() {  # MESSAGE: a user's mistake
  echo "error: $1" >&2
  exit 2
}

# shellcheck source=tools/run_tpu_gcloud.sh
source tools/run_tpu_gcloud.sh

# ---- What the workers get ------------------------------------------------------------------------

find_commit() {  # sets sha, what to check out, and url, where from
  [[ -z $(git diff --name-only HEAD) || -n $REF ]] ||
    fail "uncommitted changes in $(git diff --name-only HEAD | head -3 | xargs); commit and push"
  ! git ls-files --error-unmatch .env >/dev/null 2>&1 || fail ".env is in git; git rm --cached .env"
  sha=$(git rev-parse --verify --quiet "${REF:-HEAD}^{commit}") || fail "REF=$REF is no commit here"
  url=${REPO_URL:-$(git remote get-url origin)} || fail "this clone has no remote origin"
  url=${url/#ssh:\/\/git@/https://}  # the workers have no keys
  case $url in
    git@*:*) url=${url#git@} url=https://${url/://} ;;
    *://*@*) fail "REPO_URL or the remote origin has a user or a password in it; leave it out" ;;
  esac
  git fetch --quiet origin || fail "git fetch origin does not work here"
  [[ -n $(git for-each-ref "--contains=$sha" refs/remotes/origin) ]] ||
    fail "${REF:-HEAD} ($sha) is on no branch of origin: git push first"
  [[ -z $CONFIG ]] || git cat-file -e "$sha:$CONFIG" 2>/dev/null ||
    fail "--config $CONFIG is no file of this repository at ${REF:-HEAD}"
  git cat-file -e "$sha:tools/run_tpu_worker.sh" 2>/dev/null ||
    fail "${REF:-HEAD} has no tools/run_tpu_worker.sh, which this run_tpu.sh calls; take a newer commit"
}

sync() {
  find_commit
  local said code=0 clone checkout
  clone="[ -d $TPU_DIR/.git ] || git clone --quiet $(printf %q "$url") $TPU_DIR; cd $TPU_DIR"
  clone="$clone; git remote set-url origin $(printf %q "$url"); git fetch --quiet --tags origin"
  # A new clone may have no tools/run_tpu_worker.sh, and an old one another: take the commit's.
  checkout="worker=\$(git show $sha:tools/run_tpu_worker.sh); bash -c \"\$worker\" run_tpu_worker.sh sync"
  said=$(on "$SSH_TIMEOUT_S" "$WORKER" "set -e; $clone; $checkout $sha $force" 2>&1) || code=$?
  echo "$said" | grep -v '^error: ' || true
  [[ -z $dry_run ]] || return 0
  if [[ $code != 0 ]]; then
    tell_why "$said" "not every worker of $TPU_NAME has the commit; above are those that have"
  elif [[ $(echo "$said" | sed -n 's/.* HEAD=//p' | sort -u) != "$sha" ]]; then
    fail "the workers' HEADs above are not all $sha; look at git on the others"
  fi
  return "$code"
}

setup() {
  local packages
  read -r -a packages <<<"${TPU_PACKAGES:-}"
  sync && on 0 "$WORKER" "$(there setup "$TPU_VENV" ${packages[@]+"${packages[@]}"})"
}

send_env() {
  [[ -f .env ]] || fail ".env is not here: write WANDB_API_KEY=... into it, and what else is secret"
  on "$SSH_TIMEOUT_S" "$WORKER" "cd $TPU_DIR && touch .env && chmod 600 .env" &&
    copy .env "$TPU_DIR/.env" &&
    on "$SSH_TIMEOUT_S" "$WORKER" "$(there env "$TPU_VENV")"
}

read_settings() {  # sets settings: NAME=value of what this shell has for the run
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "PYTHON=$PYTHON has to be Python 3.10 or newer, to read config.py"
  settings=$("$PYTHON" -c '
import dataclasses, os, shlex, sys
import config
from runtime import parsing

mistakes = []
known = parsing.read_env(os.environ, config.Config, mistakes)
if mistakes:
    sys.exit("\n".join(f"error: {mistake.text}" for mistake in mistakes))
names = [field.name.upper() for field in dataclasses.fields(config.Config) if field.name in known]
for name in sorted(os.environ):
    of_a_library = name.startswith("HF_") or name in ("TOKENIZERS_PARALLELISM", "WANDB_ENTITY")
    if of_a_library and not name.endswith(("TOKEN", "KEY", "SECRET")):  # secrets go by .env alone
        names.append(name)
home = os.path.expanduser("~") + "/"
for name in names:
    for part in os.environ[name].split(","):  # REWARD_FN has FILE:FUNCTION,...
        path = part.partition(":")[0]
        if path.startswith(home) or os.path.isabs(path) and os.path.exists(path):
            print(f"warning: {name} has {path}, a path of this machine; the workers need the same "
                  "path", file=sys.stderr)
print(*[f"{name}={shlex.quote(os.environ[name])}" for name in names])
') || exit 2
}

# ---- A run ---------------------------------------------------------------------------------------

start() {  # starts one run on every worker; sets stamp
  local found said code=0
  found=$(describe) || { echo "$found" >&2; return 1; }
  if [[ -n $dry_run ]]; then
    echo "$found"
  elif [[ $found != READY* ]]; then
    echo "error: TPU VM $TPU_NAME is ${found% *}; create or --restart makes a new one" >&2
    return 1
  elif [[ $WORKER == all && -z ${REQUIRE_JAX_PROCESS_COUNT:-} && ${found##* } =~ ^[0-9]+$ ]]; then
    settings="$settings REQUIRE_JAX_PROCESS_COUNT=${found##* }"
  fi
  sync || return
  stamp=$(date -u +%Y%m%dT%H%M%SZ)
  said=$(on "$SSH_TIMEOUT_S" "$WORKER" \
    "$(there start "$NAME" "$stamp" "$TPU_VENV" "$CONFIG") $settings" 2>&1) || code=$?
  echo "$said" | grep -v '^error: ' || true
  if [[ $code != 0 ]]; then
    if [[ $said == *' started'* ]]; then
      echo "not every worker of $TPU_NAME has started; ending those that have"
      stop "$NAME" "$stamp" || true
    fi
    tell_why "$said" "not every worker of $TPU_NAME has started"
  fi
  return "$code"
}

follow() {  # worker 0's log until the run ends, then how it ended everywhere; the run's exit code
  local code=0 others=0
  echo "following worker ${WORKER/all/0}; Ctrl-C leaves the run alone: stop ends it," \
    "logs -f goes on"
  # Whenever the connection is made anew the log begins again: print what is new.
  attach | awk '/^@log begins$/ {n = 0; next} ++n > seen {seen = n; print; fflush()}' || code=$?
  on "$((SSH_TIMEOUT_S + 60))" "$WORKER" "$(there ended "$NAME" "$stamp")" || others=$?
  [[ $code != 0 ]] || code=$others
  return "$code"
}

stop() {  # NAME [UTC]: ends that run on every worker, and waits for as long as it may take to end
  local told seconds code=0
  told=$(on "$SSH_TIMEOUT_S" "$WORKER" "$(there stop "$@")") || code=$?
  echo "$told"
  # How long is the setting of the run, which may be in the workers' .env: only they can tell.
  seconds=$(echo "$told" | sed -n 's/.* is stopping .* within \([0-9]*\) seconds$/\1/p' |
    sort -n | tail -1)
  if [[ -n $seconds || -n $dry_run ]]; then
    on "$((SSH_TIMEOUT_S + 10 + seconds))" "$WORKER" "$(there stopped "$@")" || code=$?
  fi
  return "$code"
}

attach() {  # to the log, again and again if ssh fails (255) but the TPU VM is there
  local code
  while true; do
    code=0
    on 0 "${WORKER/all/0}" "$(there logs "$NAME" "$stamp")" || code=$?
    [[ $code == 255 && $(describe) == READY* ]] || return "$code"
    sleep "$RETRY_S"
  done
}

run() {
  start || return
  [[ -n $detach ]] || follow
}

run_on_spot() {  # run, and again on a new TPU VM whenever the old one is preempted
  local code fresh='' waited
  while true; do
    make_ready || return
    code=0
    if [[ -n $fresh ]]; then
      { setup && { [[ ! -f .env ]] || send_env; }; } || code=$?
      [[ $code != 2 ]] || return 2  # a mistake stays one
      [[ $code == 0 ]] || { sleep "$RETRY_S"; continue; }
      fresh=''
    fi
    run || code=$?
    [[ $code != 0 && $code != 2 ]] || return "$code"
    echo "the run has failed with exit code $code; is TPU VM $TPU_NAME preempted?"
    for waited in 0 1 2 3; do  # a worker's end is seen before its TPU VM's
      [[ $waited == 0 ]] || sleep "$RETRY_S"
      case $(describe) in
        PREEMPTED* | TERMINATED* | GONE)
          [[ $settings == *' RESUME=auto' ]] || settings="$settings RESUME=auto"  # of this very run
          continue 2 ;;
      esac
    done
    return "$code"
  done
}

# ---- Which verb ----------------------------------------------------------------------------------

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
      [[ -z $verb ]] || fail "one verb, not $verb and $1"
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
    --force) force=--force ;;
    -f) followed=-f ;;
    -h | --help) usage; exit ;;
    -*) fail "there is no flag $1; ./run_tpu.sh --help" ;;
    *) fail "there is no verb $1; ./run_tpu.sh --help" ;;
  esac
  shift
done
verb=${verb:-run}
[[ -z $followed || $verb == logs ]] || fail "-f is a flag of logs"
[[ -z $force || $verb == sync ]] || fail "--force is a flag of sync"
[[ -n $TPU_NAME ]] || fail "which TPU VM? Set TPU_NAME or --tpu"
command -v gcloud >/dev/null || fail "gcloud is not installed here"
[[ -n $ZONE ]] || ZONE=$(gcloud config get-value compute/zone 2>/dev/null || true)
[[ -n $ZONE ]] || fail "which zone is $TPU_NAME in? Set ZONE or --zone"
if [[ $verb == run && -z $NAME ]]; then
  NAME=$(basename "${CONFIG:-train_grpo}" .yaml | tr -c 'A-Za-z0-9_.\n-' _)
fi
[[ $NAME != *[!A-Za-z0-9_.-]* ]] || fail "--name takes letters, digits, _ . and -"
[[ $TPU_USER != *[!A-Za-z0-9_.-]* ]] || fail "--user takes letters, digits, _ . and -"
[[ $TPU_DIR != *[!A-Za-z0-9_./-]* ]] || fail "TPU_DIR takes letters, digits, _ . / and -"
[[ $verb != logs ]] || WORKER=${WORKER:-0}
WORKER=${WORKER:-all}
[[ $WORKER == all || $WORKER != *[!0-9]* ]] || fail "--worker is all or the number of one"

case $verb in
  delete) gcloud_tpu 0 delete "$TPU_NAME" ;;
  create | setup | sync) "$verb" ;;
  env) send_env ;;
  check)
    read_settings
    on 0 "$WORKER" "$(there check "$TPU_VENV") $settings"
    ;;
  run)
    [[ -z $restart || -n ${TPU_TYPE:-} ]] || fail "--restart has to know TPU_TYPE"
    [[ -z $restart || -z $detach ]] || fail "--restart follows the run; leave out --detach"
    read_settings
    if [[ -n $restart && -z $dry_run ]]; then run_on_spot; else run; fi
    ;;
  status) on "$SSH_TIMEOUT_S" "$WORKER" "$(there status "$NAME")" ;;
  stop) stop "$NAME" ;;
  logs) on 0 "$WORKER" "$(there logs "$NAME" $followed)" | grep -v '^@log begins$' ;;
esac
