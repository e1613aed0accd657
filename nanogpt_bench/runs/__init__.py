"""Run folders as read, whatever an interruption left of them."""
