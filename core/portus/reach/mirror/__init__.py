"""Mirrors: verified copies of committed versions elsewhere. No torch; and the library of object
stores is imported when one is opened."""
