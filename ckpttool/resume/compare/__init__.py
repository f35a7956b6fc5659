"""Two traces side by side: differences, bounds, checks and the verdict."""
