# shellcheck shell=bash
# All calls of gcloud, for run_tpu.sh, which sources this file: commands to a TPU VM's workers, and
# the TPU VM itself.

ssh_flags=()
case "$(uname -s) $(ssh -V 2>&1 || true)" in
  MINGW* | MSYS* | CYGWIN*) ;;  # gcloud calls plink there, whichever ssh is on the PATH
  *OpenSSH*)  # whose options these are; with them a machine that is gone is noticed in a minute
    ssh_flags=(--ssh-flag=-oConnectTimeout=10 --ssh-flag=-oServerAliveInterval=15
      --ssh-flag=-oServerAliveCountMax=2) ;;
esac

limited() {  # SECONDS COMMAND...: its exit code, or 124 if it had to be ended
  local seconds=$1 limit=SSH_TIMEOUT_S command watch code=0
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
    [[ $seconds == "$SSH_TIMEOUT_S" ]] ||
      limit="SSH_TIMEOUT_S=$SSH_TIMEOUT_S, and $((seconds - SSH_TIMEOUT_S)) more for the run to end"
    echo "error: no answer in $seconds seconds ($limit); is every worker up?" >&2
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
  gcloud_tpu "$1" ssh "${TPU_USER:+$TPU_USER@}$TPU_NAME" ${ssh_flags[@]+"${ssh_flags[@]}"} \
    "--worker=$2" "--command=$3"
}

copy() {  # FILE TARGET: to the workers
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

there() {  # VERB ARGUMENT...: the command that runs this verb of run_tpu_worker.sh on a worker
  echo "cd $TPU_DIR && bash tools/run_tpu_worker.sh$(printf ' %q' "$@")"
}

tell_why() {  # TEXT MESSAGE: MESSAGE, and last its cause, the errors that the workers told
  local causes
  if causes=$(echo "$1" | grep '^error: '); then
    printf '%s\n' "$2" "$causes" >&2
  else
    echo "error: $2" >&2
  fi
}

# ---- The TPU VM ----------------------------------------------------------------------------------

describe() {  # state and number of workers, or GONE; fails with what gcloud says if it cannot tell
  local found code=0
  found=$(gcloud_tpu "$SSH_TIMEOUT_S" describe "$TPU_NAME" \
    "--format=value(state,networkEndpoints.len())" 2>&1) || code=$?
  if [[ $code != 0 ]] && echo "$found" | grep -q '^ERROR: .*NOT_FOUND'; then
    echo GONE
    return
  fi
  if [[ $code == 0 && -z $dry_run ]]; then  # among the warnings, which come when all is well too
    found=$(echo "$found" | grep -E '^[A-Z_]+([[:space:]][0-9]*)?$' | tr '\t' ' ') || {
      found="error: gcloud tells no state of TPU VM $TPU_NAME" code=1
    }
  fi
  echo "$found"
  return "$code"
}

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

describe_patiently() {  # as describe does, but a network may be away for a while
  local found code waited
  for waited in 1 2 3 4 5; do
    code=0
    found=$(describe) || code=$?
    [[ $code != 0 ]] || break
    [[ $waited != 1 ]] ||
      echo "gcloud does not tell the state of TPU VM $TPU_NAME; asking again" >&2
    sleep "$RETRY_S"
  done
  echo "$found"
  return "$code"
}

make_ready() {  # returns when the TPU VM is READY; sets fresh if it had to be made anew
  local found='' last scarce=''
  while true; do
    last=$found
    found=$(describe_patiently) || { echo "$found" >&2; return 1; }
    case $found in
      READY*) return ;;
      PREEMPTED* | TERMINATED*)
        [[ $found == "$last" ]] || echo "TPU VM $TPU_NAME is ${found% *}; making it anew"
        gcloud_tpu 0 delete "$TPU_NAME" --quiet || sleep "$RETRY_S"
        ;;
      GONE)
        # shellcheck disable=SC2034  # run_on_spot reads it
        fresh=1
        if found=$(create 2>&1); then
          scarce=''
          continue
        fi
        case $(echo "$found" | grep -v '^WARNING: ') in
          *[Cc]apacity* | *EXHAUSTED*) ;;
          *) echo "$found" >&2; return 1 ;;
        esac
        [[ -n $scarce ]] || echo "no TPU VM to be had; trying again every $RETRY_S seconds"
        scarce=1
        sleep "$RETRY_S"
        ;;
      *)  # on its way
        [[ $found == "$last" ]] ||
          echo "TPU VM $TPU_NAME is ${found% *}; waiting for it to be READY"
        sleep "$RETRY_S"
        ;;
    esac
  done
}
