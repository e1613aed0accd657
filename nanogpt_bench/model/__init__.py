"""The language model, and weights from files."""
