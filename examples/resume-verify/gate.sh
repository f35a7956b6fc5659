#!/bin/sh
# gate.sh REPORT STATUS: ends with the exit code of a resume-verify whose report is in the folder REPORT.
#
# torchrun turns every failure into 1, so that STATUS, its own, tells a verdict from a crash only together with the report.
report=$1/report.json
status=$2
if [ ! -s "$report" ]; then
    echo "nothing was judged: there is no $report; see the log of the job" >&2
    [ "$status" -ne 0 ] || status=1
    exit "$status"
fi
code=$(python3 -I -c 'import json, sys; print(json.load(open(sys.argv[1]))["exit_code"])' "$report") || exit 1
case $code in
    0) echo "training goes on: the migration may proceed" >&2 ;;
    10) echo "training differs from the reference: keep the old checkpoint and see $1/report.html" >&2 ;;
    11) echo "training goes on, but a gate was not met: see $1/report.html" >&2 ;;
    12) echo "the checkpoint does not fit the job: $1/report.html says what would make it fit" >&2 ;;
    *) echo "exit code $code: see $1/report.html" >&2 ;;
esac
[ "$code" -ne 0 ] || code=$status # the job died after its report was written
exit "$code"
