"""What a tensor whose values are stored in another form stands on: its storage, and what operators do with it."""
