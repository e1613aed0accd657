"""Training of small GPTs in 8-bit floats, to see what it costs.

Weights, activations and gradients may be in any format.
"""
