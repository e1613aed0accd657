"""Train small GPTs whose weights, activations and gradients are in 8-bit floats, and
see what it costs.
"""
