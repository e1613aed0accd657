"""From settings to the parts of a run: model, formats, optimizer, task, processes."""
