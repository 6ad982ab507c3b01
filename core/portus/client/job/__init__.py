"""What a run and its ranks agree on: settings, when to save and to leave, the journal."""
