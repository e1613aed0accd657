"""The training loop of a run: its folder, its records and checkpoints, how it ends and
is resumed.
"""
