"""Index -> draft -> fill -> commit: opening, planning, converting, verifying, comparing and inspecting."""
