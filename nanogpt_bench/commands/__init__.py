"""The commands of `nanogpt-bench`: their options, and what they call."""
