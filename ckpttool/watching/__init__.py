"""`watch`: a process beside a training job that proves each of its saves."""
