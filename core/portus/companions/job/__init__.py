"""What a run and its ranks agree on: when to save and to leave, the journal."""
