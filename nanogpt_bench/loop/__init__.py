"""The training loop of a run: its folder, records and checkpoints, and its end."""
