"""From settings to what a run is made of: model, formats, optimizer, task, processes."""
