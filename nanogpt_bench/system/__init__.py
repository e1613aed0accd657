"""Errors, files, signals and what else the bench needs of the machine it runs on."""
