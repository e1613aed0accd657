"""A run's configuration: its fields, where their values come from, and what is allowed."""
