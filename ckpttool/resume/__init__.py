"""resume-verify: a checkpoint is loaded into a live FSDP2 job, and the job's next steps are judged.

settings -> launch -> worker (on every rank: job, batches, fingerprint) -> Trace
Trace, reference Trace -> judge -> Checks;  diagnosis -> Causes;  gates -> Checks;  -> Report -> report, page
"""
