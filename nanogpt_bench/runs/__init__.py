"""What a run folder says, whatever state an interrupted run left it in."""
