"""How far a loader is in its epoch, and in which order: kept and gone on with."""
