#!/usr/bin/env bash
# From your own machine to every worker of a Cloud TPU VM: ./run_tpu.sh --help
#
# The first half runs where you are (bash 3.2 will do) and reaches the workers through gcloud alone.
# The second half, the verbs named worker-..., is what it calls there, from the workers' own clone.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<'END'
./run_tpu.sh [VERB] [FLAG...]: train_grpo.py on every worker of a Cloud TPU VM, through gcloud

  create, delete   the TPU VM: TPU_TYPE (say v6e-8), TPU_VERSION (goes by the type), TPU_SPOT=1
  setup            clone, make a Python >= 3.11 .venv, install requirements.txt and jax[tpu] there,
                   and TPU_PACKAGES (say wandb)
  sync             check out, on every worker, the commit that is checked out here and pushed
  env              copy ./.env there (WANDB_API_KEY=..., HF_TOKEN=...), readable by you alone
  check            what JAX sees on every worker: backend, processes, devices, versions
  run              sync, start on every worker, follow worker 0, exit with the run's own code
  status, stop     of the newest run, on every worker       (run is what happens without a VERB)
  logs [-f]        of the newest run, on worker 0 or --worker N; -f goes on until it ends

  --config FILE    settings, a file of this repository; those set in this shell go over it and
                   are forwarded if config.py knows them: STEPS=10 ./run_tpu.sh --config FILE
  --name NAME      of the run and its logs/nohup_NAME_UTC.{log,pid,exit}; else as FILE is called
  --detach         do not follow
  --restart        when the TPU VM is preempted make it anew and start the same run again
  --tpu NAME, --zone ZONE, --project ID, --worker all|N, --ref COMMIT   (or TPU_NAME, ZONE,
                   PROJECT, WORKER, REF)  which TPU VM, which of its workers, what to check out
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

# ---- Commands to the workers ---------------------------------------------------------------------

limited() {  # SECONDS COMMAND...: its exit code, or 124 if it had to be ended
  local seconds=$1 command watch code=0
  shift
  set -m  # each in a process group of its own, so that gcloud's ssh ends with gcloud
  "$@" </dev/null &
  command=$!
  { sleep "$seconds"; kill -- "-$command"; } >/dev/null 2>&1 &
  watch=$!
  set +m
  trap 'kill -- "-$command" "-$watch" 2>/dev/null; exit 130' INT
  wait "$command" || code=$?
  trap - INT
  kill -- "-$watch" 2>/dev/null || true
  if [[ $code == 143 ]]; then
    echo "error: no answer in $seconds seconds (SSH_TIMEOUT_S); is every worker up?" >&2
    code=124
  fi
  return "$code"
}

gcloud_tpu() {  # SECONDS VERB ARGUMENT...: gcloud compute tpus tpu-vm VERB; 0 SECONDS: no limit
  local seconds=$1
  shift
  local words=(gcloud ${TPU_GCLOUD:+"$TPU_GCLOUD"} compute tpus tpu-vm "$@" "--zone=$ZONE")
  [[ -z $PROJECT ]] || words+=("--project=$PROJECT")
  if [[ -n $dry_run ]]; then
    printf '%q ' "${words[@]}"
    echo
  elif [[ $seconds == 0 ]]; then
    "${words[@]}"  # in the foreground, where Ctrl-C reaches it
  else
    limited "$seconds" "${words[@]}"
  fi
}

on() {  # SECONDS WORKERS COMMAND: runs COMMAND on them; gcloud retries, so that it may come twice
  gcloud_tpu "$1" ssh "$TPU_NAME" "${ssh_flags[@]}" "--worker=$2" "--command=$3"
}

own_verb() {  # VERB ARGUMENT...: the command that runs this very file on a worker
  local verb=worker-$1
  shift
  echo "cd $TPU_DIR && bash run_tpu.sh $verb$( (($# == 0)) || printf ' %q' "$@")"
}

describe() {  # state and number of workers, or GONE; fails with what gcloud says if it cannot tell
  local found errors code=0
  errors=$(mktemp)  # apart from the output: gcloud writes warnings to stderr when all is well
  found=$(gcloud_tpu "$SSH_TIMEOUT_S" describe "$TPU_NAME" \
    "--format=value(state,networkEndpoints.len())" 2>"$errors") || code=$?
  if [[ $code != 0 ]] && grep -q '^ERROR: .*NOT_FOUND' "$errors"; then
    found=GONE code=0
  elif [[ $code != 0 ]]; then
    found=$(cat "$errors")
  fi
  rm -f "$errors"
  echo "$found" | tr '\t' ' '
  return "$code"
}

# ---- Verbs ---------------------------------------------------------------------------------------

create() {
  local version
  case ${TPU_TYPE:-} in
    '') fail "set TPU_TYPE, say to v6e-8" ;;
    v6e*) version=v2-alpha-tpuv6e ;;
    v5p*) version=v2-alpha-tpuv5 ;;
    v5*) version=v2-alpha-tpuv5-lite ;;
    *) version=tpu-ubuntu2204-base ;;
  esac
  gcloud_tpu 0 create "$TPU_NAME" "--accelerator-type=$TPU_TYPE" \
    "--version=${TPU_VERSION:-$version}" ${TPU_SPOT:+--spot}
}

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
}

sync() {
  find_commit
  local heads code=0 stop="{ echo \"error: \$HOSTNAME:"
  heads=$(on "$SSH_TIMEOUT_S" "$WORKER" "set -e; \
[ -d $TPU_DIR/.git ] || git clone --quiet $(printf %q "$url") $TPU_DIR; cd $TPU_DIR; \
[ ! -e logs/.lock ] || flock -n logs/.lock true || \
$stop a run is alive; ./run_tpu.sh stop ends it\" >&2; exit 2; }; \
[ -z \"\$(git diff --name-only HEAD)\" ] || \
$stop a file is changed in $TPU_DIR; look at git status\" >&2; exit 2; }; \
git remote set-url origin $(printf %q "$url"); git fetch --quiet --tags origin; \
git checkout --quiet --detach $sha; echo \"\$HOSTNAME HEAD=\$(git rev-parse HEAD)\"") || code=$?
  echo "$heads"
  [[ -z $dry_run ]] || return 0
  if [[ $code != 0 ]]; then
    echo "error: not every worker of $TPU_NAME has the commit; above are those that have" >&2
  elif ! echo "$heads" | grep -q "HEAD=$sha\$" || echo "$heads" | grep HEAD= | grep -qv "HEAD=$sha\$"; then
    echo "error: the workers' HEADs above are not all $sha; look at git on the others" >&2
    code=2
  fi
  return "$code"
}

setup() {
  local packages
  read -r -a packages <<<"${TPU_PACKAGES:-}"
  sync && on 0 "$WORKER" "$(own_verb setup "$TPU_VENV" ${packages[@]+"${packages[@]}"})"
}

send_env() {
  [[ -f .env ]] || fail ".env is not here: write WANDB_API_KEY=... into it, and what else is secret"
  local flags=() flag word
  for flag in "${ssh_flags[@]}"; do
    case $flag in
      --ssh-flag=*) for word in ${flag#--ssh-flag=}; do flags+=("--scp-flag=$word"); done ;;
      *) flags+=("$flag") ;;
    esac
  done
  on "$SSH_TIMEOUT_S" "$WORKER" "cd $TPU_DIR && touch .env && chmod 600 .env" &&
    gcloud_tpu "$SSH_TIMEOUT_S" scp .env "$TPU_NAME:$TPU_DIR/.env" "${flags[@]}" \
      "--worker=$WORKER" &&
    on "$SSH_TIMEOUT_S" "$WORKER" "$(own_verb env "$TPU_VENV")"
}

read_settings() {  # sets settings: NAME=value of those of this shell that config.py knows
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "PYTHON=$PYTHON has to be Python 3.10 or newer, to read config.py"
  settings=$("$PYTHON" -c '
import dataclasses, os, shlex, sys
import config, parsing
mistakes = []
settings = parsing.read_env(os.environ, config.Config, mistakes)
if mistakes:
    sys.exit("\n".join(f"error: {mistake.text}" for mistake in mistakes))
fields = dataclasses.fields(config.Config)
names = [field.name.upper() for field in fields if field.name in settings]
print(*[f"{name}={shlex.quote(os.environ[name])}" for name in names])
') || exit 2
}

start() {  # starts one run on every worker; sets stamp
  local found started code=0
  found=$(describe) || { echo "$found" >&2; return 1; }
  if [[ -n $dry_run ]]; then
    echo "$found"
  elif [[ $found != READY* ]]; then
    echo "error: TPU VM $TPU_NAME is ${found% *}; create or --restart makes a new one" >&2
    return 1
  elif [[ $WORKER == all && -z ${REQUIRE_JAX_PROCESS_COUNT:-} ]]; then
    settings="$settings REQUIRE_JAX_PROCESS_COUNT=${found##* }"
  fi
  sync || return
  stamp=$(date -u +%Y%m%dT%H%M%SZ)
  started=$(on "$SSH_TIMEOUT_S" "$WORKER" \
    "$(own_verb start "$NAME" "$stamp" "$TPU_VENV" "$CONFIG") $settings") || code=$?
  echo "$started"
  if [[ $code != 0 ]]; then
    echo "error: not every worker of $TPU_NAME has started; ending those that have" >&2
    [[ $started != *' started'* ]] || stop "$NAME" "$stamp" || true
  fi
  return "$code"
}

follow() {  # worker 0's log until the run ends, then how it ended everywhere; the run's exit code
  local code=0 others=0
  echo "following worker ${WORKER/all/0}; Ctrl-C leaves the run alone: logs -f goes on, stop ends it"
  # Whenever the connection is made anew the log begins again: print what is new.
  attach | awk '/^@log begins$/ {n = 0; next} ++n > seen {seen = n; print; fflush()}' || code=$?
  on "$((SSH_TIMEOUT_S + 60))" "$WORKER" "$(own_verb ended "$NAME" "$stamp")" || others=$?
  [[ $code != 0 ]] || code=$others
  return "$code"
}

stop() {  # NAME [UTC]: ends that run on every worker, and waits for as long as it may take to end
  local told seconds code=0
  told=$(on "$SSH_TIMEOUT_S" "$WORKER" "$(own_verb stop "$@")") || code=$?
  echo "$told"
  # How long is the setting of the run, which may be in the workers' .env: only they can tell.
  seconds=$(echo "$told" | sed -n 's/.* is stopping .* within \([0-9]*\) seconds$/\1/p' |
    sort -n | tail -1)
  if [[ -n $seconds || -n $dry_run ]]; then
    on "$((SSH_TIMEOUT_S + 10 + seconds))" "$WORKER" "$(own_verb stopped "$@")" || code=$?
  fi
  return "$code"
}

attach() {  # to the log, again and again if ssh fails (255) but the TPU VM is there
  local code
  while true; do
    code=0
    on 0 "${WORKER/all/0}" "$(own_verb logs "$NAME" "$stamp")" || code=$?
    [[ $code == 255 && $(describe) == READY* ]] || return "$code"
    sleep "$RETRY_S"
  done
}

run() {
  start || return
  [[ -n $detach ]] || follow
}

run_on_spot() {  # run, and again on a new TPU VM whenever the old one is preempted
  local code found last fresh='' waited
  found=''
  while true; do
    last=$found
    for waited in 1 2 3 4 5; do  # a network may be away for a while
      code=0
      found=$(describe) || code=$?
      [[ $code != 0 ]] || break
      [[ $waited != 1 ]] || echo "gcloud does not tell the state of TPU VM $TPU_NAME; asking again"
      sleep "$RETRY_S"
    done
    [[ $code == 0 ]] || { echo "$found" >&2; return 1; }
    case $found in
      READY*)
        if [[ -n $fresh ]]; then
          setup || { sleep "$RETRY_S"; continue; }
          [[ ! -f .env ]] || send_env || { sleep "$RETRY_S"; continue; }
        fi
        fresh='' code=0
        run || code=$?
        [[ $code != 0 && $code != 2 ]] || return "$code"
        echo "the run has failed with exit code $code; is TPU VM $TPU_NAME preempted?"
        for waited in 0 1 2 3; do  # a worker's end is seen before its TPU VM's
          [[ $waited == 0 ]] || sleep "$RETRY_S"
          case $(describe) in PREEMPTED* | TERMINATED* | GONE) continue 2 ;; esac
        done
        return "$code"
        ;;
      PREEMPTED* | TERMINATED*)
        echo "TPU VM $TPU_NAME is ${found% *}; making it anew"
        gcloud_tpu 0 delete "$TPU_NAME" --quiet || sleep "$RETRY_S"
        [[ $settings == *' RESUME=auto' ]] || settings="$settings RESUME=auto"  # of this very run
        ;;
      GONE)
        fresh=1
        found=$(create 2>&1) || case $(echo "$found" | grep -v '^WARNING: ') in
          *[Cc]apacity* | *EXHAUSTED*) echo "no TPU VM to be had; trying again"; sleep "$RETRY_S" ;;
          *) echo "$found" >&2; return 1 ;;
        esac
        ;;
      *)  # on its way
        [[ $found == "$last" ]] || echo "TPU VM $TPU_NAME is ${found% *}; waiting for it to be READY"
        sleep "$RETRY_S"
        ;;
    esac
  done
}

# ---- On a worker, in the clone -------------------------------------------------------------------

base_of() {  # [NAME [UTC]]: logs/nohup_NAME_UTC, of the newest run where one is left out
  local file found='' pattern="logs/nohup_${1:-*}_${2:-????????T??????Z}.pid"
  for file in $pattern; do
    [[ -n $found && ! $file -nt $found ]] || found=$file
  done
  [[ -e $found ]] || fail "$HOSTNAME: no run${1:+ of the name $1} has been started here"
  echo "${found%.pid}"
}

alive() {  # while anything of a run is: it has the lock
  [[ -e logs/.lock ]] && ! flock --nonblock logs/.lock true
}

exit_code() {  # BASE SECONDS: of a run, for which it waits so long; else running, or unknown
  local waited
  for ((waited = 0; waited < 5 * $2; waited++)); do
    [[ ! -e $1.exit ]] || break
    sleep 0.2
  done
  cat "$1.exit" 2>/dev/null || if alive; then echo running; else echo unknown; fi
}

worker-setup() {  # VENV PACKAGE...
  local venv=$1 python found=
  shift
  if [[ ! -x $venv/bin/python ]]; then
    for python in python3.13 python3.12 python3.11 python3; do
      [[ -n $found ]] || ! "$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' \
        2>/dev/null || found=$python
    done
    if [[ -n $found ]]; then
      "$found" -m venv "$venv"
    else  # the image has none that will do; uv brings its own
      PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
      python3 -m uv venv --quiet --seed --python 3.12 "$venv"
    fi
  fi
  "$venv/bin/python" -m pip install --quiet -r requirements.txt "jax[tpu]" "$@"
  echo "$HOSTNAME set up: $("$venv/bin/python" --version), $("$venv/bin/python" -m pip list \
    2>/dev/null | awk '/^(jax|libtpu|flax|transformers) / {printf "%s %s ", $1, $2}')"
}

worker-env() {  # VENV: the names in .env with the lengths of their values
  chmod 600 .env
  "$1/bin/python" -c '
import os, pathlib, parsing
for name, value in parsing.read_dotenv(pathlib.Path(".env")).items():
    print(os.environ.get("HOSTNAME", ""), f".env {name}: {len(value)} characters")'
}

free_tpu() {  # or it says which process has a TPU open or holds libtpu's lock
  local holder inode sudo=()
  ! sudo -n true 2>/dev/null || sudo=(sudo -n)
  inode=$(stat -c %i "$LIBTPU_LOCKFILE" 2>/dev/null || echo none)
  holder=$({
    "${sudo[@]}" find /proc/[0-9]*/fd -lname '/dev/accel*' -o -lname '/dev/vfio/[0-9]*' \
      2>/dev/null | cut -d/ -f3 || true
    awk -v inode=":$inode\$" '$6 ~ inode {print $5}' /proc/locks
  } | sed -n 1p)
  [[ -z $holder ]] ||
    fail "$HOSTNAME: process $holder holds the TPU ($(tr '\0' ' ' <"/proc/$holder/cmdline"))"
  rm -f "$LIBTPU_LOCKFILE" 2>/dev/null || sudo -n rm -f "$LIBTPU_LOCKFILE"
}

worker-check() {  # VENV [SETTING=VALUE...]
  free_tpu
  env "${@:2}" "$1/bin/python" startup.py
}

worker-start() {  # NAME UTC VENV CONFIG [SETTING=VALUE...]
  local base=logs/nohup_$1_$2 venv=$3 waited
  [[ ! -e $base.pid ]] || return 0  # gcloud has sent the command again
  [[ -x $venv/bin/python ]] || fail "$HOSTNAME has no $venv: ./run_tpu.sh setup makes it"
  mkdir -p logs
  # The run inherits this lock, and has it for as long as anything of it is alive.
  exec 9>logs/.lock
  flock --nonblock 9 || fail "$HOSTNAME: a run is alive ($(base_of)); ./run_tpu.sh stop ends it"
  free_tpu
  nohup setsid bash run_tpu.sh worker-run "$base" "${@:3}" </dev/null >/dev/null 2>&1 &
  for ((waited = 0; waited < 100; waited++)); do
    [[ ! -s $base.pid ]] || break
    sleep 0.1
  done
  [[ -s $base.pid ]] || fail "$HOSTNAME: $base.pid cannot be written; is the disk full?"
  echo "$HOSTNAME started: process $(cat "$base.pid"), $base.log"
}

worker-run() {  # BASE VENV CONFIG [SETTING=VALUE...]: train_grpo.py, its log, its exit code
  local base=$1 python=$2/bin/python config=$3 code=0 kind name=${1%_*} tee waited
  # Written in place and renamed at the end, which a full disk does not hinder.
  printf '%-8s' running >"$base.exit.part"
  for kind in log pid exit; do
    ln -sfn "$(basename "$base").$kind" "${name}_latest.$kind"
  done
  touch "$base.log"
  # So that stop knows how long to wait. After a mistake in a setting the run ends by itself.
  { env "${@:4}" "$python" -c '
import sys, config
print(config.load(sys.argv[1:]).cfg.preemption_grace_s)' ${config:+--config "$config"} 2>/dev/null ||
    echo 0; } >"$base.grace"
  exec 8> >(exec tee "$base.log" >/dev/null)  # which goes on when the disk is full
  tee=$!
  env PYTHONUNBUFFERED=1 "${@:4}" "$python" train_grpo.py ${config:+--config "$config"} >&8 2>&1 8>&- &
  echo $! >"$base.pid"
  wait $! || code=$?
  case $code in
    134) echo "error: exit code 134: jax ended this process, most likely as another one was gone" ;;
    137) echo "error: exit code 137: somebody killed this process, or the memory ran out" ;;
    139) echo "error: exit code 139: a segmentation fault" ;;
  esac >&8
  exec 8>&-
  for ((waited = 0; waited < 20; waited++)); do  # for the last lines of the log
    kill -0 "$tee" 2>/dev/null || break
    sleep 0.1
  done
  echo "$code" 1<>"$base.exit.part"
  truncate --size=$((${#code} + 1)) "$base.exit.part"
  mv "$base.exit.part" "$base.exit"
}

worker-logs() {  # NAME [UTC]: the log; with UTC, or -f for it, until the run ends, and its exit code
  local base code utc=${2:-}
  base=$(base_of "$1" "${utc#-f}")
  if [[ -z $utc ]]; then
    cat "$base.log"
    return
  fi
  echo "@log begins"
  tail --lines=+1 --follow=name --pid="$(cat "$base.pid")" "$base.log"
  code=$(exit_code "$base" 20)
  case $code in
    running | unknown | 255) exit 1 ;;  # 255 is ssh's own
    *) exit "$code" ;;
  esac
}

worker-status() {  # [NAME [UTC]]
  local base last
  base=$(base_of "$@")
  last=$(grep -aE '^(step=|eval|DONE|STOPPED|error)' "$base.log" | tail -1 | cut -c1-160) || true
  echo "$HOSTNAME $(basename "$base") exit=$(exit_code "$base" 0) ${last:-(nothing logged yet)}"
}

worker-ended() {  # NAME UTC: how it ended, for which it waits
  [[ $(exit_code "$(base_of "$@")" 60) == 0 ]] || {
    worker-status "$@"
    exit 1
  }
  worker-status "$@"
}

worker-stop() {  # [NAME [UTC]]: SIGTERM to a run, but once: a second one would cut its saving short
  local base pid
  base=$(base_of "$@")
  pid=$(cat "$base.pid")
  if ! alive || [[ -e $base.exit ]] || ! grep -q train_grpo.py "/proc/$pid/cmdline" 2>/dev/null; then
    echo "$HOSTNAME has nothing running"
    return
  fi
  if [[ ! -e $base.stop ]]; then
    mv "$base.grace" "$base.stop"
    kill -TERM "$pid"
  fi
  echo "$HOSTNAME is stopping $(basename "$base"), which ends within $(limit_of "$base") seconds"
}

limit_of() {  # BASE: seconds that a run has from SIGTERM to SIGKILL
  echo "$(($(cat "$1.stop") + 15))"  # PREEMPTION_GRACE_S of the run, and then some
}

worker-stopped() {  # [NAME [UTC]]: how the run ended that worker-stop has sent SIGTERM to
  local base
  base=$(base_of "$@" 2>/dev/null) || return 0
  [[ -e $base.stop ]] || return 0
  [[ $(exit_code "$base" "$(limit_of "$base")") != running ]] ||
    kill -KILL "$(cat "$base.pid")" 2>/dev/null || true
  echo "$HOSTNAME stopped $(basename "$base"): exit=$(exit_code "$base" 10)"
}

# ---- Which verb ----------------------------------------------------------------------------------

LIBTPU_LOCKFILE=${LIBTPU_LOCKFILE:-/tmp/libtpu_lockfile}
if [[ ${1:-} == worker-* ]]; then
  "$@"
  exit
fi

TPU_NAME=${TPU_NAME:-} ZONE=${ZONE:-} PROJECT=${PROJECT:-} WORKER=${WORKER:-} REF=${REF:-}
TPU_GCLOUD=${TPU_GCLOUD:-} TPU_DIR=${TPU_DIR:-$(basename "$PWD")} TPU_VENV=${TPU_VENV:-.venv}
SSH_TIMEOUT_S=${SSH_TIMEOUT_S:-90} RETRY_S=${RETRY_S:-20} PYTHON=${PYTHON:-python3}
CONFIG='' NAME='' verb='' detach='' restart='' dry_run='' followed=''
# So that a machine that is gone is noticed within a minute.
ssh_flags=(--ssh-flag=-oConnectTimeout=10 --ssh-flag=-oServerAliveInterval=15
  --ssh-flag=-oServerAliveCountMax=2)
while [[ $# -gt 0 ]]; do
  case $1 in
    --config=* | --name=* | --tpu=* | --zone=* | --project=* | --worker=* | --ref=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
  esac
  case $1 in
    create | delete | setup | sync | env | check | run | status | logs | stop)
      [[ -z $verb ]] || fail "one verb, not $verb and $1"
      verb=$1 ;;
    --config | --name | --tpu | --zone | --project | --worker | --ref)
      [[ -n ${2:-} ]] || fail "$1 needs a value"
      variable=$(echo "${1#--}" | tr '[:lower:]' '[:upper:]')
      printf -v "${variable/TPU/TPU_NAME}" %s "$2"
      shift ;;
    --ssh-flag=* | --strict-host-key-checking=* | --internal-ip | --tunnel-through-iap)
      ssh_flags+=("$1") ;;
    --detach) detach=1 ;;
    --restart) restart=1 ;;
    --dry-run) dry_run=1 ;;
    -f) followed=-f ;;
    -h | --help) usage; exit ;;
    -*) fail "there is no flag $1; ./run_tpu.sh --help" ;;
    *) fail "there is no verb $1; ./run_tpu.sh --help" ;;
  esac
  shift
done
verb=${verb:-run}
[[ -z $followed || $verb == logs ]] || fail "-f is a flag of logs"
[[ -n $TPU_NAME ]] || fail "which TPU VM? Set TPU_NAME or --tpu"
command -v gcloud >/dev/null || fail "gcloud is not installed here"
[[ -n $ZONE ]] || ZONE=$(gcloud config get-value compute/zone 2>/dev/null || true)
[[ -n $ZONE ]] || fail "which zone is $TPU_NAME in? Set ZONE or --zone"
if [[ $verb == run && -z $NAME ]]; then
  NAME=$(basename "${CONFIG:-train_grpo}" .yaml | tr -c 'A-Za-z0-9_.\n-' _)
fi
[[ $NAME != *[!A-Za-z0-9_.-]* ]] || fail "--name takes letters, digits, _ . and -"
[[ $TPU_DIR != *[!A-Za-z0-9_./-]* ]] || fail "TPU_DIR takes letters, digits, _ . / and -"
[[ $verb != logs ]] || WORKER=${WORKER:-0}
WORKER=${WORKER:-all}
[[ $WORKER == all || $WORKER != *[!0-9]* ]] || fail "--worker is all or the number of one"

case $verb in
  create) create ;;
  delete) gcloud_tpu 0 delete "$TPU_NAME" ;;
  setup) setup ;;
  sync) sync ;;
  env) send_env ;;
  check)
    read_settings
    on 0 "$WORKER" "$(own_verb check "$TPU_VENV") $settings"
    ;;
  run)
    [[ -z $restart || -n ${TPU_TYPE:-} ]] || fail "--restart has to know TPU_TYPE"
    [[ -z $restart || -z $detach ]] || fail "--restart follows the run; leave out --detach"
    read_settings
    if [[ -n $restart && -z $dry_run ]]; then run_on_spot; else run; fi
    ;;
  status) on "$SSH_TIMEOUT_S" "$WORKER" "$(own_verb status "$NAME")" ;;
  stop) stop "$NAME" ;;
  logs) on 0 "$WORKER" "$(own_verb logs "$NAME" $followed)" | grep -v '^@log begins$' ;;
esac
