"""The arithmetic of formats on plain tensors: below it there is no tensor subclass."""
