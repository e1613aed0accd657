"""Errors, files, signals, memory, processes and the hub: what the bench needs of its
machine.
"""
