"""Which layout a folder has, what lies beside it, and what resumes from it."""
