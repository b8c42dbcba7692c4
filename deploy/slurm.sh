#!/usr/bin/env bash
# A run on nodes of Slurm: the words after the script's name are plaudit's.
#
#     sbatch --nodes 4 deploy/slurm.sh grpo grpo.yaml output=/shared/runs name=first
#
# PLAUDIT_PORT is the head's port (6379), RAY_START further words for `ray start`, such as "--temp-dir /local/ray".
# The first node has Ray's head and the driver. Slurm sends TERM five minutes before the time is over, or when the job has
# to give way: the run then saves and ends, and the job is queued again; `resume=latest` continues it (a first run starts).
# Folders and models must be at the same path on all nodes.
#SBATCH --job-name=plaudit
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -euo pipefail

port="${PLAUDIT_PORT:-6379}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Only processes with the token may connect; srun hands variables on. A node that is lost is given up after 6 seconds.
RAY_AUTH_TOKEN="$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
export RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=1000 RAY_health_check_failure_threshold=3

# shellcheck disable=SC2016  # expanded on the node
# A node's own share of GPUs and CPUs is what Slurm says; Ray would count the whole machine.
node='exec ray start "$@" --block --num-cpus "${SLURM_CPUS_ON_NODE:-$(nproc)}" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" ${RAY_START:-}'
srun --overlap --nodes 1 --ntasks 1 --nodelist "${nodes[0]}" bash -c "$node" ray --head --port "$port" &
if [ "${#nodes[@]}" -gt 1 ]; then
  others="$(IFS=,; echo "${nodes[*]:1}")"
  srun --overlap --nodes $((${#nodes[@]} - 1)) --nodelist "$others" \
    bash -c "until (exec 3<>/dev/tcp/${nodes[0]}/$port) 2>/dev/null; do sleep 1; done; $node" ray --address "${nodes[0]}:$port" &
fi
python - "${nodes[0]}:$port" "${#nodes[@]}" <<'PYTHON'
import socket, sys, time

import ray

address, count = sys.argv[1], int(sys.argv[2])
host, _, port = address.rpartition(":")
end = time.monotonic() + 300
while True:
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"Ray's head did not answer at {address} within five minutes: {error}")
        time.sleep(1)
ray.init(address=address, log_to_driver=False, logging_level="error")
while (there := sum(node["Alive"] for node in ray.nodes())) < count:
    if time.monotonic() > end:
        sys.exit(f"{there} of {count} nodes joined Ray's head at {address} within five minutes")
    time.sleep(1)
PYTHON

plaudit "$@" runtime.kind=ray "runtime.address=${nodes[0]}:$port" resume=latest &
run=$!
stopped=0
trap 'stopped=1; kill -TERM "$run"' TERM
status=0
wait "$run" || status=$?
if [ "$stopped" = 1 ]; then  # a signal ends the first wait
  status=0
  wait "$run" || status=$?
  if [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then  # and scancel has not ended it
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
# shellcheck disable=SC2046  # one word for each process
kill $(jobs -p) 2>/dev/null || true
exit "$status"
