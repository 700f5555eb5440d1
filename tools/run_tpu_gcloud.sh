# shellcheck shell=bash
# run_tpu.sh sources this file. It contains all calls of gcloud: those that run a command on the
# workers of a TPU VM, and those that create, describe and delete the TPU VM.

ssh_flags=()
case "$(uname -s) $(ssh -V 2>&1 || true)" in
  # On Windows gcloud calls plink, whichever ssh is on the PATH.
  MINGW* | MSYS* | CYGWIN*) ;;
  # These are options of OpenSSH alone. With them ssh notices in a minute that a machine is gone.
  *OpenSSH*)
    ssh_flags=(--ssh-flag=-oConnectTimeout=10 --ssh-flag=-oServerAliveInterval=15
      --ssh-flag=-oServerAliveCountMax=2) ;;
esac

# limited SECONDS COMMAND...: runs COMMAND and ends it after SECONDS. Returns its exit code, or 124
# if COMMAND had to be ended.
limited() {
  local seconds=$1 limit=SSH_TIMEOUT_S command watch code=0
  shift
  # Every background job gets a process group, so that the ssh of gcloud ends together with gcloud.
  set -m
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
    [[ $seconds == "$SSH_TIMEOUT_S" ]] ||
      limit="SSH_TIMEOUT_S=$SSH_TIMEOUT_S, and $((seconds - SSH_TIMEOUT_S)) more for the run to end"
    echo "error: no answer in $seconds seconds ($limit); is every worker up?" >&2
    code=124
  fi
  return "$code"
}

# gcloud_tpu SECONDS VERB ARGUMENT...: calls gcloud compute tpus tpu-vm VERB for at most SECONDS.
# 0 means that there is no limit. With --quiet gcloud asks nothing: nobody could answer.
gcloud_tpu() {
  local seconds=$1
  shift
  local words=(gcloud ${TPU_GCLOUD:+"$TPU_GCLOUD"} compute tpus tpu-vm "$@" "--zone=$ZONE" --quiet)
  [[ -z $PROJECT ]] || words+=("--project=$PROJECT")
  if [[ -n $dry_run ]]; then
    printf '%q ' "${words[@]}"
    echo
  elif [[ $seconds == 0 ]]; then
    "${words[@]}"  # gcloud runs in the foreground, where Ctrl-C reaches it.
  else
    limited "$seconds" "${words[@]}"
  fi
}

# on_workers SECONDS WORKERS COMMAND: runs COMMAND on all workers or on one. gcloud retries when a
# connection fails, so COMMAND may run twice on a worker.
on_workers() {
  gcloud_tpu "$1" ssh "${TPU_USER:+$TPU_USER@}$TPU_NAME" ${ssh_flags[@]+"${ssh_flags[@]}"} \
    "--worker=$2" "--command=$3"
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
  gcloud_tpu "$SSH_TIMEOUT_S" scp "$1" "${TPU_USER:+$TPU_USER@}$TPU_NAME:$2" \
    ${flags[@]+"${flags[@]}"} "--worker=$WORKER"
}

# worker_command VERB ARGUMENT...: prints the command that runs VERB of run_tpu_worker.sh on a
# worker.
worker_command() {
  echo "cd $TPU_DIR && bash tools/run_tpu_worker.sh$(printf ' %q' "$@")"
}

# report_causes OUTPUT MESSAGE: prints MESSAGE, and after it the errors in the workers' OUTPUT. If
# OUTPUT has no errors, MESSAGE is the error.
report_causes() {
  local causes
  if causes=$(echo "$1" | grep '^error: '); then
    printf '%s\n' "$2" "$causes" >&2
  else
    echo "error: $2" >&2
  fi
}

# ---- The TPU VM ----------------------------------------------------------------------------------

# Prints the state of the TPU VM and its number of workers, or GONE if there is no such TPU VM. If
# gcloud fails otherwise, prints the output of gcloud and fails.
describe() {
  local found code=0
  found=$(gcloud_tpu "$SSH_TIMEOUT_S" describe "$TPU_NAME" \
    "--format=value(state,networkEndpoints.len())" 2>&1) || code=$?
  if [[ $code != 0 ]] && echo "$found" | grep -q '^ERROR: .*NOT_FOUND'; then
    echo GONE
    return
  fi
  if [[ $code == 0 && -z $dry_run ]]; then
    # gcloud prints warnings around the state, even when everything is well.
    found=$(echo "$found" | grep -E '^[A-Z_]+([[:space:]][0-9]*)?$' | tr '\t' ' ') || {
      found="error: gcloud does not print the state of TPU VM $TPU_NAME" code=1
    }
  fi
  echo "$found"
  return "$code"
}

create() {
  local version
  case ${TPU_TYPE:-} in
    '') fail "set TPU_TYPE to the type of the TPU VM, such as v6e-8" ;;
    v6e*) version=v2-alpha-tpuv6e ;;
    v5p*) version=v2-alpha-tpuv5 ;;
    v5*) version=v2-alpha-tpuv5-lite ;;
    *) version=tpu-ubuntu2204-base ;;
  esac
  gcloud_tpu 0 create "$TPU_NAME" "--accelerator-type=$TPU_TYPE" \
    "--version=${TPU_VERSION:-$version}" ${TPU_SPOT:+--spot}
}

# Does the same as describe, and tries several times, because the network may be down for a while.
describe_patiently() {
  local found code waited
  for waited in 1 2 3 4 5; do
    code=0
    found=$(describe) || code=$?
    [[ $code != 0 ]] || break
    [[ $waited != 1 ]] ||
      echo "gcloud cannot describe TPU VM $TPU_NAME; trying again" >&2
    sleep "$RETRY_S"
  done
  echo "$found"
  return "$code"
}

# Returns when the TPU VM is READY. Sets fresh if the TPU VM was created here.
make_ready() {
  local found='' last scarce=''
  while true; do
    last=$found
    found=$(describe_patiently) || { echo "$found" >&2; return 1; }
    case $found in
      READY*) return ;;
      PREEMPTED* | TERMINATED*)
        [[ $found == "$last" ]] || echo "TPU VM $TPU_NAME is ${found% *}; creating it again"
        gcloud_tpu 0 delete "$TPU_NAME" || sleep "$RETRY_S"
        ;;
      GONE)
        # shellcheck disable=SC2034  # run_on_spot in run_tpu.sh reads fresh.
        fresh=1
        if found=$(create 2>&1); then
          scarce=''
          continue
        fi
        case $(echo "$found" | grep -v '^WARNING: ') in
          *[Cc]apacity* | *EXHAUSTED*) ;;
          *) echo "$found" >&2; return 1 ;;
        esac
        [[ -n $scarce ]] || echo "there is no capacity; trying again every $RETRY_S seconds"
        scarce=1
        sleep "$RETRY_S"
        ;;
      *)  # The TPU VM is being created or started.
        [[ $found == "$last" ]] ||
          echo "TPU VM $TPU_NAME is ${found% *}; waiting for it to be READY"
        sleep "$RETRY_S"
        ;;
    esac
  done
}
