"""What a run records of its steps, its state and its environment."""
