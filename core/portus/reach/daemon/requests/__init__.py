"""What a host does for each request of a client that was let in."""
