"""Messages and bytes between a trainer and a storage host: sockets, and verbs."""
