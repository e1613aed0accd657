"""Reading run folders, also those of interrupted runs."""
