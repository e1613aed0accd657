"""A run's configuration: its settings, where values come from, and what is allowed."""
