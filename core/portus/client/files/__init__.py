"""Reference files, which versions they hold, and where those versions live."""
