#!/usr/bin/env bash
# run_tpu.sh calls this script on every worker of a TPU VM, in the folder of the worker's clone:
#     bash tools/run_tpu_worker.sh VERB ARGUMENT...
# For sync it calls the text of this script in the commit that the worker will check out.
set -euo pipefail
LIBTPU_LOCKFILE=${LIBTPU_LOCKFILE:-/tmp/libtpu_lockfile}
export HOSTNAME

# fail MESSAGE: reports a mistake of the user and exits with code 2.
fail() {
  echo "error: $1" >&2
  exit 2
}

# ---- What several verbs use ----------------------------------------------------------------------

# base_of [NAME [UTC]]: prints logs/nohup_NAME_UTC, the beginning of the names of a run's files.
# Without UTC this is the newest run of that NAME, without NAME the newest run.
base_of() {
  local file found='' pattern="logs/nohup_${1:-*}_${2:-????????T??????Z}.pid"
  for file in $pattern; do
    [[ -n $found && ! $file -nt $found ]] || found=$file
  done
  [[ -e $found ]] || fail "$HOSTNAME: no run${1:+ named $1} has been started on this worker"
  echo "${found%.pid}"
}

# Succeeds while any process of a run is alive, because these processes hold the lock.
alive() {
  [[ -e logs/.lock ]] && ! flock --nonblock logs/.lock true
}

# exit_code BASE SECONDS: waits up to SECONDS for the run to end and prints its exit code. Prints
# running if the run has not ended, and unknown if the run is gone and has left no exit code.
exit_code() {
  local waited
  for ((waited = 0; waited < 5 * $2; waited++)); do
    [[ ! -e $1.exit ]] || break
    sleep 0.2
  done
  cat "$1.exit" 2>/dev/null || if alive; then echo running; else echo unknown; fi
}

# need_python VENV: fails if the Python environment VENV does not exist on this worker.
need_python() {
  [[ -x $1/bin/python ]] || fail "$HOSTNAME has no $1; run ./run_tpu.sh setup first"
}

# Removes the lock file of libtpu, which an earlier process may have left. Fails if a process has a
# TPU open or holds the lock.
free_tpu() {
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

# ---- The clone and its packages ------------------------------------------------------------------

# sync COMMIT [--force]: checks out COMMIT. With --force, files that differ on this worker are put
# into git stash, and git names the untracked files, which stay.
sync() {
  local file overwritten=() names
  ! alive || fail "$HOSTNAME: a run is still alive; end it with ./run_tpu.sh stop"
  while IFS= read -r -d '' file; do
    [[ ! -e $file ]] || overwritten+=("$file")
  done < <(git diff -z --name-only --no-renames --diff-filter=A HEAD "$1")
  names=$({
    git -c core.quotePath=off diff --name-only HEAD
    printf '%s\n' "${overwritten[@]}"
  } | sed '/^$/d' | sort -u | paste -s -d ' ')
  if [[ -n $names ]]; then
    [[ ${2:-} == --force ]] ||
      fail "$HOSTNAME: these files differ: $names; ./run_tpu.sh sync --force stashes them"
    # git stash takes only files that git knows.
    [[ ${#overwritten[@]} == 0 ]] || git add --force -- "${overwritten[@]}"
    git stash push --quiet --message "run_tpu.sh sync --force to $1"
    echo "$HOSTNAME has put these files into git stash: $names"
  fi
  git checkout --quiet --detach "$1"
  [[ ${2:-} != --force ]] || git -c core.quotePath=off status -sb | sed "s/^/$HOSTNAME git: /"
  echo "$HOSTNAME HEAD=$(git rev-parse HEAD)"
}

# setup VENV CONFIG PACKAGES [SETTING=VALUE...]: creates the Python environment VENV and installs in
# it what the settings need, and PACKAGES, which are separated by spaces.
setup() {
  local venv=$1 config=$2 python packages printed found=
  local new_enough='import sys, ensurepip; sys.exit(sys.version_info < (3, 11))'
  read -r -a packages <<<"$3"
  if [[ ! -x $venv/bin/python ]]; then
    for python in python3.13 python3.12 python3.11 python3; do
      if "$python" -c "$new_enough" 2>/dev/null; then
        found=$python
        break
      fi
    done
    if [[ -n $found ]]; then
      "$found" -m venv "$venv"
    else  # This machine has no Python that is new enough; uv downloads one.
      PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
      python3 -m uv venv --quiet --seed --python 3.12 "$venv"
    fi
  fi
  "$venv/bin/python" -m pip install --quiet -r requirements.txt "jax[tpu]" \
    ${packages[@]+"${packages[@]}"}
  printed=$(env "${@:4}" "$venv/bin/python" config.py ${config:+--config "$config"}) || exit 2
  if grep -qE '^run.wandb_mode: (online|offline)' <<<"$printed"; then
    echo "$HOSTNAME installs wandb"
    "$venv/bin/python" -m pip install --quiet "$(grep '^wandb' requirements-parity.txt)"
  fi
  if grep -q '^rollout.backend: sglang_jax' <<<"$printed"; then
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' ||
      fail "$HOSTNAME: $venv has a Python older than 3.12, which sglang-jax needs; install a newer \
Python there, remove $venv and repeat setup"
    echo "$HOSTNAME installs sglang-jax"
    "$venv/bin/python" -m pip install --quiet -r requirements-sglang.txt "jax[tpu]"
    "$venv/bin/python" -m pip install --quiet --no-deps --pre "sglang-jax==0.1.0rc0"
  fi
  echo "$HOSTNAME set up: $("$venv/bin/python" --version), $("$venv/bin/python" -m pip list \
    2>/dev/null | awk '/^(jax|libtpu|flax|transformers) / {printf "%s %s ", $1, $2}')"
}

# show_env VENV: prints the names in .env and the lengths of their values, never the values.
show_env() {
  chmod 600 .env
  "$1/bin/python" -c '
import os, pathlib
from runtime import parsing
for name, value in parsing.read_dotenv(pathlib.Path(".env")).items():
    print(os.environ["HOSTNAME"], f".env {name}: {len(value)} characters")'
}

# check VENV [SETTING=VALUE...]: prints the user and the system of this worker, and the devices that
# JAX sees.
check() {
  need_python "$1"
  echo "$HOSTNAME check: $(whoami), $(sed -n 's/^PRETTY_NAME="\(.*\)"$/\1/p' /etc/os-release)," \
    "$(uname -sr), $("$1/bin/python" --version)"
  free_tpu
  env "${@:2}" "$1/bin/python" startup.py
}

# ---- A run ---------------------------------------------------------------------------------------

# start NAME UTC VENV CONFIG [SETTING=VALUE...]: starts a run in the background.
start() {
  local base=logs/nohup_$1_$2 venv=$3 waited
  [[ ! -e $base.pid ]] || return 0  # gcloud has sent the command a second time.
  need_python "$venv"
  mkdir -p logs
  # All processes of the run inherit this lock and hold it until the last of them ends.
  exec 9>logs/.lock
  flock --nonblock 9 ||
    fail "$HOSTNAME: $(base_of) is still alive; end it with ./run_tpu.sh stop"
  free_tpu
  nohup setsid bash tools/run_tpu_worker.sh run "$base" "${@:3}" </dev/null >/dev/null 2>&1 &
  for ((waited = 0; waited < 100; waited++)); do
    [[ ! -s $base.pid ]] || break
    sleep 0.1
  done
  [[ -s $base.pid ]] || fail "$HOSTNAME: $base.pid cannot be written; is the disk full?"
  echo "$HOSTNAME started: process $(cat "$base.pid"), $base.log"
}

# run BASE VENV CONFIG [SETTING=VALUE...]: runs train_grpo.py and writes its log and exit code.
run() {
  local base=$1 python=$2/bin/python config=$3 code=0 kind name=${1%_*} limits tee waited
  # The exit code overwrites these bytes, and the file is renamed. Both work on a full disk too.
  printf '%-8s' running >"$base.exit.part"
  for kind in log pid exit; do
    ln -sfn "$(basename "$base").$kind" "${name}_latest.$kind"
  done
  touch "$base.log"
  # stop needs PREEMPTION_GRACE_S, and status needs STEPS. If a setting is wrong, neither is known,
  # and the run ends by itself.
  limits=$(env "${@:4}" "$python" -c '
import sys, config
cfg = config.load(sys.argv[1:]).cfg
print(cfg.preemption_grace_s, cfg.steps)' ${config:+--config "$config"} 2>/dev/null) ||
    limits=0
  echo "${limits% *}" >"$base.grace"
  [[ $limits == 0 ]] || echo "${limits#* }" >"$base.steps"
  exec 8> >(exec tee "$base.log" >/dev/null)  # tee continues when the disk is full.
  tee=$!
  env PYTHONUNBUFFERED=1 "${@:4}" "$python" train_grpo.py ${config:+--config "$config"} \
    >&8 2>&1 8>&- &
  echo $! >"$base.pid"
  wait $! || code=$?
  case $code in
    134) echo "error: exit code 134: jax ended the process, probably because another was gone" ;;
    137) echo "error: exit code 137: the process was killed, or the machine ran out of memory" ;;
    139) echo "error: exit code 139: the process ended by a segmentation fault" ;;
  esac >&8
  exec 8>&-
  for ((waited = 0; waited < 20; waited++)); do  # Wait for the last lines of the log.
    kill -0 "$tee" 2>/dev/null || break
    sleep 0.1
  done
  echo "$code" 1<>"$base.exit.part"
  truncate --size=$((${#code} + 1)) "$base.exit.part"
  mv "$base.exit.part" "$base.exit"
}

# logs NAME [UTC | -f]: prints the log. With UTC or -f, follows the log until the run ends and exits
# with the exit code of the run.
logs() {
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
    running | unknown | 255) exit 1 ;;  # 255 would mean that ssh has failed.
    *) exit "$code" ;;
  esac
}

# status [NAME [UTC]]: prints one line with the state and the progress of the run, and the last line
# of its log that is a step, an evaluation, the end or an error.
status() {
  local base code end seconds steps told progress last
  base=$(base_of "$@")
  code=$(exit_code "$base" 0)
  case $code in
    running) end=$(date +%s) ;;
    unknown) end=$(stat -c %Y "$base.log") ;;
    *) end=$(stat -c %Y "$base.exit") ;;
  esac
  seconds=$((end - $(stat -c %Y "$base.pid")))
  steps=$(sed 's/^/ of /' "$base.steps" 2>/dev/null) || true
  told=$(grep -aE '^(step=[0-9]+ loss|eval(_full|uation for)? |DONE: |STOPPED: |error: )' \
    "$base.log") || true
  last=$(echo "$told" | tail -1 | cut -c1-160)
  progress=$(echo "$told" | sed -n 's/^step=\([0-9]*\) .* dt=\([0-9.]*\)s.*/\1 \2/p' | tail -1)
  # Steps are counted from 0: after step=0 the run has done 1 step.
  [[ -z $progress ]] || progress="step $((${progress% *} + 1))$steps, ${progress#* } s a step"
  printf '%s %s exit=%s pid=%s elapsed=%d:%02d:%02d %s: %s\n' "$HOSTNAME" "$(basename "$base")" \
    "$code" "$(cat "$base.pid")" $((seconds / 3600)) $((seconds / 60 % 60)) $((seconds % 60)) \
    "${progress:-no step$steps yet}" "${last:-(nothing logged yet)}"
}

# ended NAME UTC: waits until the run has ended and prints its status. Fails if the run failed.
ended() {
  [[ $(exit_code "$(base_of "$@")" 60) == 0 ]] || {
    status "$@"
    exit 1
  }
  status "$@"
}

# stop [NAME [UTC]]: sends SIGTERM to the run once. A second SIGTERM would end the run before it has
# saved its checkpoint.
stop() {
  local base pid
  base=$(base_of "$@")
  pid=$(cat "$base.pid")
  if ! alive || [[ -e $base.exit ]] ||
    ! grep -q train_grpo.py "/proc/$pid/cmdline" 2>/dev/null; then
    echo "$HOSTNAME has nothing running"
    return
  fi
  if [[ ! -e $base.stop ]]; then
    mv "$base.grace" "$base.stop"
    kill -TERM "$pid"
  fi
  echo "$HOSTNAME is stopping $(basename "$base"), which ends within $(limit_of "$base") seconds"
}

# limit_of BASE: prints how many seconds the run has from SIGTERM to SIGKILL.
limit_of() {
  echo "$(($(cat "$1.stop") + 15))"  # The file holds PREEMPTION_GRACE_S of the run.
}

# stopped [NAME [UTC]]: waits for the run to which stop has sent SIGTERM and prints its exit code.
# A run that does not end in time is killed.
stopped() {
  local base
  base=$(base_of "$@" 2>/dev/null) || return 0
  [[ -e $base.stop ]] || return 0
  [[ $(exit_code "$base" "$(limit_of "$base")") != running ]] ||
    kill -KILL "$(cat "$base.pid")" 2>/dev/null || true
  echo "$HOSTNAME stopped $(basename "$base"): exit=$(exit_code "$base" 10)"
}

# ---- The command line ----------------------------------------------------------------------------

verb=${1:-}
shift || true
case $verb in
  sync | setup | check | start | run | logs | status | ended | stop | stopped) "$verb" "$@" ;;
  env) show_env "$@" ;;
  *) fail "there is no verb $verb for a worker; ./run_tpu.sh --help lists your verbs" ;;
esac
