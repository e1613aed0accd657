"""The language model, models of transformers, and weights from files."""
