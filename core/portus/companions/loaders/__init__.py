"""The position of loaders in their epoch, and the order of samples, to save and to resume."""
