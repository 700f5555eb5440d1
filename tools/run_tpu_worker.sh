#!/usr/bin/env bash
# What run_tpu.sh calls on every worker of a TPU VM, in the worker's clone:
#     bash tools/run_tpu_worker.sh VERB ARGUMENT...
# Where there is no clone yet, sync is called with this file's text from the commit to check out.
set -euo pipefail
LIBTPU_LOCKFILE=${LIBTPU_LOCKFILE:-/tmp/libtpu_lockfile}
export HOSTNAME

fail() {  # MESSAGE: a user's mistake
  echo "error: $1" >&2
  exit 2
}

# ---- What the verbs share ------------------------------------------------------------------------

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

need_python() {  # VENV
  [[ -x $1/bin/python ]] || fail "$HOSTNAME has no $1: ./run_tpu.sh setup makes it"
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

# ---- The clone and what it needs -----------------------------------------------------------------

sync() {  # COMMIT [--force]: checks it out; with --force what differs here goes into git stash
  local file overwritten=() names
  ! alive || fail "$HOSTNAME: a run is alive; ./run_tpu.sh stop ends it"
  while IFS= read -r -d '' file; do
    [[ ! -e $file ]] || overwritten+=("$file")
  done < <(git diff -z --name-only --no-renames --diff-filter=A HEAD "$1")
  names=$({
    git -c core.quotePath=off diff --name-only HEAD
    printf '%s\n' "${overwritten[@]}"
  } | sed '/^$/d' | sort -u | paste -s -d ' ')
  if [[ -n $names ]]; then
    [[ ${2:-} == --force ]] ||
      fail "$HOSTNAME: these files differ there: $names; ./run_tpu.sh sync --force stashes them"
    [[ ${#overwritten[@]} == 0 ]] || git add --force -- "${overwritten[@]}"  # for stash to take
    git stash push --quiet --message "run_tpu.sh sync --force to $1"
    echo "$HOSTNAME has put into git stash: $names"
  fi
  git checkout --quiet --detach "$1"
  echo "$HOSTNAME HEAD=$(git rev-parse HEAD)"
}

setup() {  # VENV PACKAGE...
  local venv=$1 python found=
  local new_enough='import sys, ensurepip; sys.exit(sys.version_info < (3, 11))'
  shift
  if [[ ! -x $venv/bin/python ]]; then
    for python in python3.13 python3.12 python3.11 python3; do
      if "$python" -c "$new_enough" 2>/dev/null; then
        found=$python
        break
      fi
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

show_env() {  # VENV: the names in .env with the lengths of their values
  chmod 600 .env
  "$1/bin/python" -c '
import os, pathlib
from runtime import parsing
for name, value in parsing.read_dotenv(pathlib.Path(".env")).items():
    print(os.environ["HOSTNAME"], f".env {name}: {len(value)} characters")'
}

check() {  # VENV [SETTING=VALUE...]
  need_python "$1"
  echo "$HOSTNAME check: $(sed -n 's/^PRETTY_NAME="\(.*\)"$/\1/p' /etc/os-release), $(uname -sr)," \
    "$("$1/bin/python" --version)"
  free_tpu
  env "${@:2}" "$1/bin/python" startup.py
}

# ---- A run ---------------------------------------------------------------------------------------

start() {  # NAME UTC VENV CONFIG [SETTING=VALUE...]
  local base=logs/nohup_$1_$2 venv=$3 waited
  [[ ! -e $base.pid ]] || return 0  # gcloud has sent the command again
  need_python "$venv"
  mkdir -p logs
  # The run inherits this lock, and has it for as long as anything of it is alive.
  exec 9>logs/.lock
  flock --nonblock 9 || fail "$HOSTNAME: a run is alive ($(base_of)); ./run_tpu.sh stop ends it"
  free_tpu
  nohup setsid bash tools/run_tpu_worker.sh run "$base" "${@:3}" </dev/null >/dev/null 2>&1 &
  for ((waited = 0; waited < 100; waited++)); do
    [[ ! -s $base.pid ]] || break
    sleep 0.1
  done
  [[ -s $base.pid ]] || fail "$HOSTNAME: $base.pid cannot be written; is the disk full?"
  echo "$HOSTNAME started: process $(cat "$base.pid"), $base.log"
}

run() {  # BASE VENV CONFIG [SETTING=VALUE...]: train_grpo.py, its log, its exit code
  local base=$1 python=$2/bin/python config=$3 code=0 kind name=${1%_*} limits tee waited
  # Written in place and renamed at the end, which a full disk does not hinder.
  printf '%-8s' running >"$base.exit.part"
  for kind in log pid exit; do
    ln -sfn "$(basename "$base").$kind" "${name}_latest.$kind"
  done
  touch "$base.log"
  # For stop and for status. After a mistake in a setting the run ends by itself.
  limits=$(env "${@:4}" "$python" -c '
import sys, config
cfg = config.load(sys.argv[1:]).cfg
print(cfg.preemption_grace_s, cfg.steps)' ${config:+--config "$config"} 2>/dev/null) ||
    limits=0
  echo "${limits% *}" >"$base.grace"
  [[ $limits == 0 ]] || echo "${limits#* }" >"$base.steps"
  exec 8> >(exec tee "$base.log" >/dev/null)  # which goes on when the disk is full
  tee=$!
  env PYTHONUNBUFFERED=1 "${@:4}" "$python" train_grpo.py ${config:+--config "$config"} \
    >&8 2>&1 8>&- &
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

logs() {  # NAME [UTC]: the log; with UTC, or -f for it, until the run ends, and its exit code
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

status() {  # [NAME [UTC]]: one line: how far the run is, and the last line of its log that counts
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
  told=$(grep -aE '^(step=|eval|DONE|STOPPED|error)' "$base.log") || true
  last=$(echo "$told" | tail -1 | cut -c1-160)
  progress=$(echo "$told" | grep '^step=' | tail -1 |
    sed -n 's/^step=\([0-9]*\) .* dt=\([0-9.]*\)s.*/\1 \2/p') || true
  # step=0 is the first step: after it one step is done.
  [[ -z $progress ]] || progress="step $((${progress% *} + 1))$steps, ${progress#* } s a step"
  printf '%s %s exit=%s pid=%s elapsed=%d:%02d:%02d %s: %s\n' "$HOSTNAME" "$(basename "$base")" \
    "$code" "$(cat "$base.pid")" $((seconds / 3600)) $((seconds / 60 % 60)) $((seconds % 60)) \
    "${progress:-no step$steps yet}" "${last:-(nothing logged yet)}"
}

ended() {  # NAME UTC: how it ended, for which it waits
  [[ $(exit_code "$(base_of "$@")" 60) == 0 ]] || {
    status "$@"
    exit 1
  }
  status "$@"
}

stop() {  # [NAME [UTC]]: SIGTERM to a run, but once: a second one would cut its saving short
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

limit_of() {  # BASE: seconds that a run has from SIGTERM to SIGKILL
  echo "$(($(cat "$1.stop") + 15))"  # PREEMPTION_GRACE_S of the run, and then some
}

stopped() {  # [NAME [UTC]]: how the run ended that stop has sent SIGTERM to
  local base
  base=$(base_of "$@" 2>/dev/null) || return 0
  [[ -e $base.stop ]] || return 0
  [[ $(exit_code "$base" "$(limit_of "$base")") != running ]] ||
    kill -KILL "$(cat "$base.pid")" 2>/dev/null || true
  echo "$HOSTNAME stopped $(basename "$base"): exit=$(exit_code "$base" 10)"
}

# ---- Which verb ----------------------------------------------------------------------------------

verb=${1:-}
shift || true
case $verb in
  sync | setup | check | start | run | logs | status | ended | stop | stopped) "$verb" "$@" ;;
  env) show_env "$@" ;;
  *) fail "there is no verb $verb for a worker; ./run_tpu.sh --help tells the verbs for you" ;;
esac
