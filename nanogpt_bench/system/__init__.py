"""What the bench needs of its machine: errors, files, signals, memory, processes."""
