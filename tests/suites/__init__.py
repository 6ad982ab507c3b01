"""Others' own tests of checkpoints, with their stock code and with Portus, side by side."""
