"""The testers that stay: a structure-aware fuzzer with the real readers as its oracle, faults of system calls, kills, races.

make torture MINUTES=30                     everything, as long as that takes
python -m tests.torture --replay ID         one case again, by the ID that a report gives it

seeds.py      small checkpoints of every layout, most of them written by torch, safetensors and plain Python
mutations.py  what is done to them, as a function of a random generator; torchfiles.py: to pickles, zips, trees
oracle.py     what torch, safetensors and DeepSpeed read from a checkpoint; what ckpttool reads; whether that is equal
fuzz.py       one mutant: sandbox, limits, verdict; and the workers
lab.py        the process in which the next four run, without torch
shim.c        LD_PRELOAD: the Nth system call below a folder fails, is cut short, or is the last one
faults.py     every call of a small conversion of each kind, failing, through the real command line
kills.py      the same conversions, killed
races.py      two runs at one place, a reader during --force, a source that changes, full and layered file systems
report.py     the table, and the JSON that replays every failure
"""
