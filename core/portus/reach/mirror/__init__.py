"""Mirrors: verified copies of committed versions elsewhere. Imports no torch, and the library of
object stores only when one is opened."""
