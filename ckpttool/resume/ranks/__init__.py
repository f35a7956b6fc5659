"""The processes of a run: how they start, what each of them does, where they write."""
