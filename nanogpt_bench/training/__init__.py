"""One training run: the loop, its files in the run folder, how it ends and goes on."""
