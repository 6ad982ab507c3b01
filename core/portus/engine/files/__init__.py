"""The order of what happens at paths, and who waits for it."""
