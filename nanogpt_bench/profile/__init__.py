"""What a configuration costs, and what a model's tensors need of a format."""
