#!/bin/sh
# torchrun.sh NODES THIS_NODE MASTER: the same on machines without a scheduler; run it on each of them, THIS_NODE from 0 on.
#
# NEW, OLD, CONFIG, REPORT and SCRATCH come from the environment; the latter two are folders that all machines share.
set -u
nodes=$1 this=$2 master=$3
here=$(dirname "$0")
[ "$this" -ne 0 ] || rm -f "$REPORT/report.json" # of an earlier run
export PYTHONSAFEPATH=1 # the ranks of `torchrun -m` take no modules from the current folder

# shellcheck disable=SC2086 # OPTIONS are words: "--min-mfu 0.4 --dtype bf16"
torchrun --nnodes="$nodes" --node-rank="$this" --nproc-per-node="${GPUS_PER_NODE:-8}" --master-addr="$master" \
    --master-port="${MASTER_PORT:-29500}" -m ckpttool resume-verify "$NEW" \
    --against "$OLD" --config "$CONFIG" --scratch "$SCRATCH" --report "$REPORT" ${OPTIONS:-}
status=$?
[ "$this" -eq 0 ] || exit "$status" # rank 0 writes the report
exec sh "$here/gate.sh" "$REPORT" "$status"
