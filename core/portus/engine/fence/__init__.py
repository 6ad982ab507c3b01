"""Nobody writes what a save still has to read (V7): writers, the fence, the clock, the snapshot."""
