"""The agreements of a run and its ranks: when to save and to leave, and the journal."""
