"""What a rank trains: the job of the user or a model by its config, its steps, and loading into it."""
