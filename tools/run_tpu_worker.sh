#!/usr/bin/env bash
# run_tpu.sh calls this script on every worker of a TPU VM, in the folder of the worker's clone:
#     bash tools/run_tpu_worker.sh VERB ARGUMENT...
# For sync it calls the text of this script in the commit that the worker will check out.
set -euo pipefail
LIBTPU_LOCKFILE=${LIBTPU_LOCKFILE:-/tmp/libtpu_lockfile}
export HOSTNAME

# fail MESSAGE: reports a mistake of the user and exits with code 2.
fail() {
  echo "error: $HOSTNAME: $1" >&2
  exit 2
}

# ---- Functions of several verbs ------------------------------------------------------------------

# base_of [NAME [UTC]]: prints logs/nohup_NAME_UTC, the beginning of the names of a run's files.
# Without UTC this is the newest run of that NAME, without NAME the newest run.
base_of() {
  local file newest='' pattern="logs/nohup_${1:-*}_${2:-????????T??????Z}.pid"
  for file in $pattern; do
    [[ -n $newest && ! $file -nt $newest ]] || newest=$file
  done
  [[ -e $newest ]] || fail "no run${1:+ named $1} has been started on this worker"
  echo "${newest%.pid}"
}

# Succeeds while any process of a run is alive, because these processes hold the lock.
alive() {
  [[ -e logs/.lock ]] && ! flock --nonblock logs/.lock true
}

# exit_code BASE: prints the exit code of the run. Prints running if the run has not ended, and
# unknown if the run is gone and has left no exit code.
exit_code() {
  cat "$1.exit" 2>/dev/null || if alive; then echo running; else echo unknown; fi
}

# wait_for_end BASE: waits until the run has ended.
wait_for_end() {
  until [[ -e $1.exit ]] || ! alive; do sleep 0.2; done
}

# Removes the lock file of libtpu, which an earlier process may have left. Fails if a process has a
# TPU or the lock file open.
free_tpu() {
  local holder message sudo=()
  ! sudo -n true 2>/dev/null || sudo=(sudo -n)
  holder=$({ "${sudo[@]}" find /proc/[0-9]*/fd '(' -lname '/dev/accel*' -o \
    -lname '/dev/vfio/[0-9]*' -o -lname "$LIBTPU_LOCKFILE" ')' 2>/dev/null || true; } |
    cut -d/ -f3 | sed -n 1p)
  [[ -z $holder ]] ||
    fail "process $holder holds the TPU ($(tr '\0' ' ' <"/proc/$holder/cmdline"))"
  message=$("${sudo[@]}" rm -f "$LIBTPU_LOCKFILE" 2>&1) ||
    fail "$message; it belongs to $(stat -c %U "$LIBTPU_LOCKFILE"), who has to remove it"
}

# ---- The clone and its packages ------------------------------------------------------------------

# sync COMMIT: checks out COMMIT.
sync() {
  local names
  ! alive || fail "a run is still alive; end it with ./run_tpu.sh stop"
  names=$(git diff --name-only HEAD | paste -s -d ' ')
  [[ -z $names ]] ||
    fail "these files differ from the commit there: $names; undo the changes with git checkout"
  git checkout --quiet --detach "$1"
  echo "$HOSTNAME HEAD=$(git rev-parse HEAD)"
}

# setup VENV CONFIG PACKAGES [SETTING=VALUE...]: creates the Python environment VENV and installs the
# packages that the settings need, and PACKAGES, which are separated by spaces.
setup() {
  local venv=$1 config=$2 python package packages printed trackers
  local new_enough='import sys, ensurepip; sys.exit(sys.version_info < (3, 11))'
  read -r -a packages <<<"$3"
  for python in python3.13 python3.12 python3.11 python3; do
    [[ ! -x $venv/bin/python ]] || break
    ! "$python" -c "$new_enough" 2>/dev/null || "$python" -m venv "$venv"
  done
  [[ -x $venv/bin/python ]] ||
    fail "there is no Python 3.11 or newer; docs/tpu_vm.md has a command that installs one"
  "$venv/bin/python" -m pip install --quiet -r requirements.txt "jax[tpu]" \
    ${packages[@]+"${packages[@]}"}
  printed=$(env "${@:4}" "$venv/bin/python" config.py ${config:+--config "$config"}) || exit 2
  trackers=$(sed -nE 's/^run.report_to: ([a-z,]+) .*/\1/p; s/^run.wandb_mode: o.*/wandb/p' \
    <<<"$printed")
  for package in ${trackers//,/ }; do
    echo "$HOSTNAME installs $package"
    "$venv/bin/python" -m pip install --quiet "$(grep "^$package" requirements-parity.txt)"
  done
  if grep -q '^rollout.backend: sglang_jax' <<<"$printed"; then
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' ||
      fail "$venv has a Python older than 3.12, which sglang-jax needs; docs/tpu_vm.md has a \
command that installs a newer one"
    echo "$HOSTNAME installs sglang-jax"
    "$venv/bin/python" -m pip install --quiet -r requirements-sglang.txt "jax[tpu]"
    "$venv/bin/python" -m pip install --quiet --no-deps --pre "sglang-jax==0.1.0rc0"
  fi
  echo "$HOSTNAME set up: $("$venv/bin/python" --version), $("$venv/bin/python" -m pip list \
    2>/dev/null | awk '/^(jax|libtpu|flax|transformers) / {printf "%s %s ", $1, $2}')"
}

# show_env VENV: prints the names in .env and the lengths of their values, never the values.
show_env() {
  "$1/bin/python" -c '
import os, pathlib
from infra.settings import read_dotenv
for name, value in read_dotenv(pathlib.Path(".env")).items():
    print(os.environ["HOSTNAME"], f".env {name}: {len(value)} characters")'
}

# check VENV [SETTING=VALUE...]: prints the user and the system of this worker, and the devices that
# JAX sees.
check() {
  echo "$HOSTNAME check: $(whoami), $(sed -n 's/^PRETTY_NAME="\(.*\)"$/\1/p' /etc/os-release)," \
    "$(uname -sr), $("$1/bin/python" --version)"
  free_tpu
  env "${@:2}" "$1/bin/python" startup.py
}

# ---- A run ---------------------------------------------------------------------------------------

# start NAME UTC VENV CONFIG [SETTING=VALUE...]: starts a run in the background.
start() {
  local base=logs/nohup_$1_$2 waited
  [[ ! -e $base.pid ]] || return 0  # gcloud has sent the command a second time.
  [[ -x $3/bin/python ]] || fail "there is no $3; run ./run_tpu.sh setup first"
  mkdir -p logs
  # All processes of the run inherit this lock, and the last of them gives it up.
  { exec 9>>logs/.lock; } 2>/dev/null || fail "logs/.lock cannot be opened; another user has made it"
  flock --nonblock 9 || fail "$(base_of) is still alive; end it with ./run_tpu.sh stop"
  free_tpu
  nohup setsid bash tools/run_tpu_worker.sh run "$base" "${@:3}" </dev/null >/dev/null 2>&1 &
  for ((waited = 0; waited < 100; waited++)); do
    [[ ! -s $base.pid ]] || break
    sleep 0.1
  done
  [[ -s $base.pid ]] || fail "$base.pid cannot be written; is the disk full?"
  echo "$HOSTNAME started: process $(cat "$base.pid"), $base.log"
}

# run BASE VENV CONFIG [SETTING=VALUE...]: runs $SCRIPT, by default train_grpo.py, and writes its log and exit code.
run() {
  local base=$1 config=$3 code=0 kind
  for kind in log pid exit; do
    ln -sfn "$(basename "$base").$kind" "${base%_*}_latest.$kind"
  done
  env PYTHONUNBUFFERED=1 "${@:4}" "$2/bin/python" "${SCRIPT:-train_grpo.py}" \
    ${config:+--config "$config"} >"$base.log" 2>&1 &
  echo $! >"$base.pid"
  wait $! || code=$?
  echo "$code" >"$base.exit.part" && mv "$base.exit.part" "$base.exit"
}

# logs [NAME]: prints the log.
logs() {
  cat "$(base_of "$@").log"
}

# follow LINES [NAME [UTC]]: prints the log from LINES on, as tail counts them, until the run ends,
# and exits with the exit code of the run.
follow() {
  local base code
  base=$(base_of "${@:2}")
  tail --lines="$1" --follow=name --pid="$(cat "$base.pid")" "$base.log"
  wait_for_end "$base"
  code=$(exit_code "$base")
  [[ $code != unknown && $code != 255 ]] || code=1  # 255 would mean that ssh has failed.
  exit "$code"
}

# status [NAME [UTC]]: prints one line with the state of the run and the last line of its log that is
# a step, an evaluation, the end or an error.
status() {
  local base code end seconds last
  base=$(base_of "$@")
  code=$(exit_code "$base")
  case $code in
    running) end=$(date +%s) ;;
    unknown) end=$(stat -c %Y "$base.log") ;;
    *) end=$(stat -c %Y "$base.exit") ;;
  esac
  seconds=$((end - $(stat -c %Y "$base.pid")))
  last=$(grep -aE '^(step=[0-9]+ loss|eval(_full)? |DONE: |STOPPED: |error: )' \
    "$base.log" | tail -1 | cut -c1-160) || true
  printf '%s %s exit=%s pid=%s elapsed=%d:%02d:%02d %s\n' "$HOSTNAME" "$(basename "$base")" \
    "$code" "$(cat "$base.pid")" $((seconds / 3600)) $((seconds / 60 % 60)) $((seconds % 60)) \
    "${last:-(no step yet)}"
}

# ended NAME UTC: waits until the run has ended and prints its status. Fails if the run failed.
ended() {
  local base
  base=$(base_of "$@")
  wait_for_end "$base"
  status "$@"
  [[ $(exit_code "$base") == 0 ]]
}

# stop [NAME [UTC]]: sends SIGTERM to the run, and waits until the run has ended. PREEMPTION_GRACE_S
# of the run limits this time.
stop() {
  local base pid
  base=$(base_of "$@" 2>/dev/null) || base=logs/none
  pid=$(cat "$base.pid" 2>/dev/null) || pid=none
  if [[ -e $base.exit ]] || ! alive ||
    # Another process may have this number now.
    ! grep -qz '\.py$' "/proc/$pid/cmdline" 2>/dev/null ||
    [[ $(readlink "/proc/$pid/cwd") != $(pwd -P) ]]; then
    echo "$HOSTNAME has nothing running"
    return
  fi
  # A second SIGTERM would end the run before it has saved its checkpoint.
  [[ -e $base.stop ]] || kill -TERM "$pid" 2>/dev/null || true
  touch "$base.stop"
  wait_for_end "$base"
  echo "$HOSTNAME stopped $(basename "$base"): exit=$(exit_code "$base")"
}

# ---- The command line ----------------------------------------------------------------------------

verb=${1:-}
shift || true
case $verb in
  sync | setup | check | start | run | logs | follow | status | ended | stop) "$verb" "$@" ;;
  env) show_env "$@" ;;
  *) fail "there is no verb $verb for a worker; ./run_tpu.sh --help lists your verbs" ;;
esac
