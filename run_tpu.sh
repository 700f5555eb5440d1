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
  setup [PACKAGE]  clone, make a Python >= 3.11 .venv, install requirements.txt and jax[tpu] there
  sync             check out, on every worker, the commit that is checked out here and pushed
  env              copy ./.env there (WANDB_API_KEY=..., HF_TOKEN=...), readable by you alone
  check            what JAX sees on every worker: backend, processes, devices, versions
  run              sync, start on every worker, follow worker 0, exit with the run's own code
  status, stop     of the newest run, on every worker       (run is what happens without a VERB)
  logs [-f]        of the newest run, on worker 0 or --worker N; -f goes on until it ends

  --config FILE    settings, a file of this repository; those set in this shell go over it and
                   are forwarded if config.py knows them: STEPS=10 ./run_tpu.sh --config FILE
  --name NAME      of the run and its logs/nohup_NAME_UTC.{log,pid,exit}; else as FILE is called
  --detach         do not follow          --restart  when the TPU VM is gone, make it anew, go on
  --tpu NAME, --zone ZONE, --project ID, --worker all|0|0,2, --ref COMMIT   (or TPU_NAME, ZONE,
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

quoted() {  # WORD...: as a shell reads them back
  local word
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_./:=,@%+-]*) printf " '%s'" "$(printf %s "$word" | sed "s/'/'\\\\''/g")" ;;
      *) printf ' %s' "$word" ;;
    esac
  done
}

limited() {  # SECONDS COMMAND...: its exit code, or 124 if it had to be ended
  local seconds=$1 command watch code=0
  shift
  "$@" &
  command=$!
  (sleep "$seconds"; kill "$command") >/dev/null 2>&1 &
  watch=$!
  wait "$command" || code=$?
  kill "$watch" 2>/dev/null || {
    echo "error: no answer in SSH_TIMEOUT_S=$seconds seconds; is every worker up?" >&2
    code=124
  }
  return "$code"
}

gcloud_tpu() {  # SECONDS VERB ARGUMENT...: gcloud compute tpus tpu-vm VERB; 0 SECONDS: no limit
  local seconds=$1
  shift
  local words=(gcloud ${TPU_GCLOUD:+"$TPU_GCLOUD"} compute tpus tpu-vm "$@" "--zone=$ZONE")
  [[ -z $PROJECT ]] || words+=("--project=$PROJECT")
  if [[ -n $dry_run ]]; then
    quoted "${words[@]}" | sed 's/^ //'
    echo
  elif [[ $seconds == 0 ]]; then
    "${words[@]}"  # in the foreground, where Ctrl-C reaches it
  else
    limited "$seconds" "${words[@]}"
  fi
}

on() {  # SECONDS WORKERS COMMAND: runs COMMAND on them; gcloud retries, so that it may come twice
  gcloud_tpu "$1" ssh "$TPU_NAME" ${ssh_flags[@]+"${ssh_flags[@]}"} "--worker=$2" "--command=$3"
}

own_verb() {  # VERB ARGUMENT...: the command that runs this very file on a worker
  local verb=worker-$1
  shift
  echo "cd $TPU_DIR && bash run_tpu.sh$(quoted "$verb" "$@")"
}

describe() {  # state and number of workers, nothing if there is no such TPU VM
  gcloud_tpu "$SSH_TIMEOUT_S" describe "$TPU_NAME" \
    "--format=value(state,networkEndpoints.len())"
}

# ---- Verbs ---------------------------------------------------------------------------------------

create() {
  local type=${TPU_TYPE:-} version
  case ${type:?error: set TPU_TYPE, say to v6e-8} in
    v6e*) version=v2-alpha-tpuv6e ;;
    v5p*) version=v2-alpha-tpuv5 ;;
    v5*) version=v2-alpha-tpuv5-lite ;;
    *) version=tpu-ubuntu2204-base ;;
  esac
  gcloud_tpu 0 create "$TPU_NAME" "--accelerator-type=$type" \
    "--version=${TPU_VERSION:-$version}" ${TPU_SPOT:+--spot}
}

find_commit() {  # sets sha, what to check out, and url, where from
  [[ -z $(git diff --name-only HEAD) || -n $REF ]] ||
    fail "uncommitted changes in $(git diff --name-only HEAD | head -3 | xargs); commit and push"
  sha=$(git rev-parse --verify --quiet "${REF:-HEAD}^{commit}") || fail "REF=$REF is no commit here"
  url=${REPO_URL:-$(git remote get-url origin)} || fail "no remote origin here; set REPO_URL"
  case $url in
    *://*:*@* | *://*@*) fail "REPO_URL or the remote origin has a password in it; leave it out" ;;
    git@*:*) url=${url#git@} url=https://${url/://} ;;  # the workers have no keys
  esac
  git fetch --quiet origin || fail "git fetch origin does not work here"
  if [[ -z $(git for-each-ref "--contains=$sha" refs/remotes/origin) ]] &&
    ! git ls-remote origin | grep -q "^$sha"; then
    fail "${REF:-HEAD} ($sha) is not pushed: git push first"
  fi
  [[ -z $CONFIG ]] || git cat-file -e "$sha:$CONFIG" 2>/dev/null ||
    fail "--config $CONFIG is no file of this repository at ${REF:-HEAD}"
}

sync() {
  find_commit
  local heads code=0 dirty="a file is changed there: cd $TPU_DIR; git status"
  heads=$(on "$SSH_TIMEOUT_S" "$WORKER" "set -e; \
[ -d $TPU_DIR/.git ] || git clone --quiet$(quoted "$url") $TPU_DIR; cd $TPU_DIR; \
git remote set-url origin$(quoted "$url"); git fetch --quiet --tags origin; \
[ -z \"\$(git diff --name-only HEAD)\" ] || { echo \"error: \$HOSTNAME: $dirty\" >&2; exit 2; }; \
git checkout --quiet --detach $sha; echo \"\$HOSTNAME HEAD=\$(git rev-parse HEAD)\"") || code=$?
  echo "$heads"
  [[ -z $dry_run ]] || return 0
  if [[ $code != 0 ]]; then
    echo "error: not every worker of $TPU_NAME has the commit; above are those that have" >&2
    return "$code"
  fi
  if echo "$heads" | grep 'HEAD=' | grep -qv "HEAD=$sha\$"; then
    fail "the workers' HEADs above are not all $sha; look at git on the others"
  fi
}

setup() {
  sync
  on 0 "$WORKER" "$(own_verb setup "$TPU_VENV" "$@")"
}

send_env() {
  [[ -f .env ]] || fail ".env is not here: write WANDB_API_KEY=... into it, and what else is secret"
  on "$SSH_TIMEOUT_S" "$WORKER" "cd $TPU_DIR && touch .env && chmod 600 .env"
  local flags=() flag
  for flag in ${ssh_flags[@]+"${ssh_flags[@]}"}; do
    flags+=("${flag/--ssh-flag/--scp-flag}")
  done
  gcloud_tpu "$SSH_TIMEOUT_S" scp .env "$TPU_NAME:$TPU_DIR/.env" ${flags[@]+"${flags[@]}"} \
    "--worker=$WORKER"
  on "$SSH_TIMEOUT_S" "$WORKER" "$(own_verb env)"
}

read_settings() {  # sets settings: NAME=value of those of this shell that config.py knows
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "PYTHON=$PYTHON has to be Python 3.10 or newer, to read config.py"
  settings=$("$PYTHON" -c '
import dataclasses, os, shlex, sys
import config, parsing
fields = {field.name.upper(): field for field in dataclasses.fields(config.Config)}
try:
    parsing.stop_at_typos(os.environ, list(fields))
    for name in fields.keys() & os.environ.keys():
        parsing.parse(fields[name], os.environ[name], name)
except ValueError as error:
    sys.exit(f"error: {error}")
print(*[f"{name}={shlex.quote(os.environ[name])}" for name in fields if name in os.environ])
') || exit 2
}

start() {  # starts one run on every worker; sets stamp
  local found workers
  found=$(describe) || return
  [[ -n $dry_run ]] || [[ $found == READY* ]] ||
    fail "TPU VM $TPU_NAME is ${found:-not there}; ./run_tpu.sh create makes one"
  [[ -z $dry_run ]] || echo "$found"
  workers=${found##*[!0-9]}
  read_settings
  if [[ $WORKER == all && -n $workers && -z ${REQUIRE_JAX_PROCESS_COUNT:-} ]]; then
    settings="$settings REQUIRE_JAX_PROCESS_COUNT=$workers"
  fi
  sync || return
  stamp=$(date -u +%Y%m%dT%H%M%SZ)
  if ! on "$SSH_TIMEOUT_S" "$WORKER" \
    "$(own_verb start "$NAME" "$stamp" "$TPU_VENV" "$CONFIG") $settings"; then
    echo "error: not every worker of $TPU_NAME has started; ending those that have" >&2
    on "$SSH_TIMEOUT_S" "$WORKER" "$(own_verb stop "$NAME" "$stamp")" || true
    return 1
  fi
}

follow() {  # worker 0's log until the run ends, then how it ended everywhere; the run's exit code
  local code=0 others=0 first=${WORKER%%[,-]*}
  echo "following worker ${first/all/0}; Ctrl-C leaves the run alone: logs -f goes on, stop ends it"
  # When ssh fails gcloud connects anew, and the log begins again: print what is new.
  on 0 "${first/all/0}" "$(own_verb follow "$NAME" "$stamp")" |
    awk '/^@log begins$/ {n = 0; next} ++n > seen {seen = n; print; fflush()}' || code=$?
  on "$SSH_TIMEOUT_S" "$WORKER" "$(own_verb ended "$NAME" "$stamp")" || others=$?
  [[ $code != 0 ]] || code=$others
  return "$code"
}

run() {
  start || return
  [[ -n $detach ]] || follow
}

run_on_spot() {  # run, and again on a new TPU VM whenever the old one is gone
  local code found waited
  while true; do
    code=0
    run || code=$?
    [[ $code != 0 && $code != 2 ]] || return "$code"
    for waited in 0 20 20 20; do  # a worker's end is seen before its TPU VM's
      sleep "$waited"
      found=$(describe 2>/dev/null) || found=
      [[ $found == READY* ]] || break
    done
    [[ $found != READY* ]] || return "$code"
    echo "TPU VM $TPU_NAME is ${found:-gone}; making it anew"
    [[ -z $found ]] || gcloud_tpu 0 delete "$TPU_NAME" --quiet
    until create; do
      echo "no TPU VM to be had; trying again in a minute"
      sleep 60
    done
    setup
    [[ ! -f .env ]] || send_env
  done
}

# ---- On a worker, in the clone -------------------------------------------------------------------

newest() {  # [NAME]: logs/nohup_NAME_UTC of the newest run
  local file found='' pattern="logs/nohup_${1:-*}_????????T??????Z.pid"
  for file in $pattern; do
    [[ -n $found && ! $file -nt $found ]] || found=$file
  done
  [[ -e $found ]] || fail "$HOSTNAME: no run${1:+ of the name $1} has been started here"
  echo "${found%.pid}"
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
      python3 -m pip install --quiet --user uv
      python3 -m uv venv --quiet --seed --python 3.12 "$venv"
    fi
  fi
  "$venv/bin/python" -m pip install --quiet -r requirements.txt "jax[tpu]" "$@"
  echo "$HOSTNAME set up: $("$venv/bin/python" --version), $("$venv/bin/python" -m pip list \
    2>/dev/null | awk '/^(jax|libtpu|flax|transformers) / {printf "%s %s ", $1, $2}')"
}

worker-env() {  # the names in .env with the lengths of their values
  chmod 600 .env
  sed -n -E "s/^(export )?([A-Za-z_][A-Za-z0-9_]*)=[\"']?(.*[^\"'])[\"']?\$/\2 \3/p" .env |
    while read -r name value; do echo "$HOSTNAME .env $name: ${#value} characters"; done
}

tpu_holders() {  # ids of the processes that have a TPU open or hold libtpu's lock
  local inode sudo=()
  ! sudo -n true 2>/dev/null || sudo=(sudo -n)
  ${sudo[@]+"${sudo[@]}"} find /proc/[0-9]*/fd -lname '/dev/accel*' -o -lname '/dev/vfio/[0-9]*' \
    2>/dev/null | cut -d/ -f3 || true
  if inode=$(stat -c %i "$LIBTPU_LOCKFILE" 2>/dev/null); then
    awk -v inode=":$inode\$" '$6 ~ inode {print $5}' /proc/locks
  fi
}

free_tpu() {  # or it says who has it
  local holder
  holder=$(tpu_holders | head -1)
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
  mkdir -p logs
  [[ -x $venv/bin/python ]] || fail "$HOSTNAME has no $venv: ./run_tpu.sh setup makes it"
  # The run inherits this lock, and has it for as long as anything of it is alive.
  exec 9>logs/.lock
  if ! flock --nonblock 9; then
    [[ ! -e $base.pid ]] || return 0  # this very run: gcloud has sent the command again
    fail "$HOSTNAME: a run is alive ($(newest)); ./run_tpu.sh stop ends it"
  fi
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
  local base=$1 python=$2/bin/python config=$3 code=0 kind name=${1%_*}
  # Written in place and renamed at the end, which a full disk does not hinder.
  printf '%-8s' running >"$base.exit.part"
  for kind in log pid exit; do
    ln -sfn "$(basename "$base").$kind" "${name}_latest.$kind"
  done
  # tee goes on without a log when the disk is full; the run would not.
  touch "$base.log"
  exec 8> >(exec tee "$base.log" >/dev/null)
  local tee=$!
  env PYTHONUNBUFFERED=1 "${@:4}" "$python" train_grpo.py ${config:+--config "$config"} >&8 2>&1 8>&- &
  echo $! >"$base.pid"
  wait $! || code=$?
  case $code in
    134) echo "error: exit code 134: jax ended this process, most likely as another one was gone" ;;
    137) echo "error: exit code 137: somebody killed this process, or the memory ran out" ;;
    139) echo "error: exit code 139: a segmentation fault" ;;
  esac >&8
  exec 8>&-
  wait "$tee" || true
  echo "$code" 1<>"$base.exit.part"
  truncate --size=$((${#code} + 1)) "$base.exit.part"
  mv "$base.exit.part" "$base.exit"
}

exit_code() {  # BASE SECONDS: waits so long for the run's exit code and prints it
  local waited
  for ((waited = 0; waited < 5 * $2; waited++)); do
    [[ ! -e $1.exit ]] || break
    sleep 0.2
  done
  cat "$1.exit" 2>/dev/null || echo unknown
}

worker-follow() {  # NAME UTC: the log until the run ends, and its exit code
  local base=logs/nohup_$1_$2 code
  echo "@log begins"
  tail --lines=+1 --follow=name --pid="$(cat "$base.pid")" "$base.log"
  code=$(exit_code "$base" 20)
  [[ $code != unknown && $code != 255 ]] || exit 1  # 255 is ssh's own
  exit "$code"
}

worker-ended() {  # NAME UTC: how it ended, for which it waits
  local code
  code=$(exit_code "logs/nohup_$1_$2" 60)
  echo "$HOSTNAME exit=$code"
  [[ $code == 0 ]]
}

worker-status() {  # [NAME]
  local base state last
  base=$(newest "${1:-}")
  state="exit=$(cat "$base.exit" 2>/dev/null || echo unknown)"
  ! kill -0 "$(cat "$base.pid")" 2>/dev/null || [[ -e $base.exit ]] || state=running
  last=$(grep -aE '^(step=|eval|DONE|error)' "$base.log" | tail -1 | cut -c1-120) || true
  echo "$HOSTNAME $(basename "$base") $state ${last:-(nothing logged yet)}"
}

worker-logs() {  # NAME [-f]
  local base
  base=$(newest "$1")
  if [[ ${2:-} == -f ]]; then
    tail --lines=+1 --follow=name --pid="$(cat "$base.pid")" "$base.log"
  else
    cat "$base.log"
  fi
}

worker-stop() {  # [NAME [UTC]]
  local base
  if [[ -n ${2:-} ]]; then base=logs/nohup_$1_$2; else base=$(newest "${1:-}"); fi
  if [[ -e $base.pid && ! -e $base.exit ]] && kill -TERM "$(cat "$base.pid")" 2>/dev/null; then
    if [[ $(exit_code "$base" 45) == unknown ]]; then
      kill -KILL "$(cat "$base.pid")" 2>/dev/null || true
    fi
    echo "$HOSTNAME stopped $(basename "$base"): exit=$(exit_code "$base" 10)"
  else
    echo "$HOSTNAME has nothing running"
  fi
}

# ---- Which verb ----------------------------------------------------------------------------------

HOSTNAME=${HOSTNAME:-$(hostname)}
LIBTPU_LOCKFILE=${LIBTPU_LOCKFILE:-/tmp/libtpu_lockfile}
if [[ ${1:-} == worker-* ]]; then
  "$@"
  exit
fi

TPU_NAME=${TPU_NAME:-} ZONE=${ZONE:-} PROJECT=${PROJECT:-} WORKER=${WORKER:-} REF=${REF:-}
TPU_GCLOUD=${TPU_GCLOUD:-} TPU_DIR=${TPU_DIR:-$(basename "$PWD")} TPU_VENV=${TPU_VENV:-.venv}
SSH_TIMEOUT_S=${SSH_TIMEOUT_S:-90} PYTHON=${PYTHON:-python3}
CONFIG='' NAME='' verb=run detach='' restart='' dry_run='' more=() ssh_flags=()
case ${1:-} in
  create | delete | setup | sync | env | check | run | status | logs | stop) verb=$1; shift ;;
esac
while [[ $# -gt 0 ]]; do
  case $1 in
    --config=* | --name=* | --tpu=* | --zone=* | --project=* | --worker=* | --ref=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
  esac
  case $1 in
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
    -h | --help) usage; exit ;;
    -f) [[ $verb == logs ]] || fail "-f is a flag of logs"; more+=(-f) ;;
    -*) fail "there is no flag $1; ./run_tpu.sh --help" ;;
    *) [[ $verb == setup ]] || fail "there is no verb $1; ./run_tpu.sh --help"; more+=("$1") ;;
  esac
  shift
done
[[ -n $TPU_NAME ]] || fail "which TPU VM? Set TPU_NAME or --tpu"
[[ -n $ZONE ]] || ZONE=$(gcloud config get-value compute/zone 2>/dev/null || true)
[[ -n $ZONE ]] || fail "which zone is $TPU_NAME in? Set ZONE or --zone"
case $TPU_DIR$NAME in
  *[!A-Za-z0-9_./-]*) fail "TPU_DIR and --name take letters, digits, _ . / and -" ;;
esac
[[ $verb != logs ]] || WORKER=${WORKER:-0}
WORKER=${WORKER:-all}

case $verb in
  create) create ;;
  delete) gcloud_tpu 0 delete "$TPU_NAME" ;;
  setup) setup ${more[@]+"${more[@]}"} ;;
  sync) sync ;;
  env) send_env ;;
  check)
    read_settings
    on 0 "$WORKER" "$(own_verb check "$TPU_VENV") $settings"
    ;;
  run)
    [[ -n $NAME ]] || NAME=$(basename "${CONFIG:-train_grpo}" .yaml)
    [[ -z $restart || -n ${TPU_TYPE:-} ]] || fail "--restart has to know TPU_TYPE"
    [[ -z $restart || -z $detach ]] || fail "--restart follows the run; leave out --detach"
    if [[ -n $restart ]]; then run_on_spot; else run; fi
    ;;
  status | stop) on "$SSH_TIMEOUT_S" "$WORKER" "$(own_verb "$verb" "$NAME")" ;;
  logs) on 0 "$WORKER" "$(own_verb logs "$NAME" ${more[@]+"${more[@]}"})" ;;
esac
